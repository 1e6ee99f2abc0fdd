// Numbers of the two update rules; update.h states the rules.
#ifndef TFSCALE_OPTIMIZERS_RULES_H_
#define TFSCALE_OPTIMIZERS_RULES_H_

namespace tfscale {
namespace optimizers {

// The ops read these structs from their vector `hyper`: its order is the order
// of the members, here and nowhere else.
struct LambNumbers {
  float learning_rate;
  float beta_1;
  float rest_1;  // 1 - beta_1; in float32 its error would be 5e-5 for 0.999
  float beta_2;
  float rest_2;
  float correction_1;  // 1 / (1 - beta_1^t), or 1
  float correction_2;
  float epsilon;
  float weight_decay;
  float lower;  // bounds of |w| in the trust ratio
  float upper;
};

struct LarsNumbers {
  float learning_rate;
  float momentum;
  float trust;
  float epsilon;
  float weight_decay;
};

struct LarsSwitches {
  bool adapt;
  bool nesterov;
  bool rate_inside;  // whether the learning rate is inside the momentum
  bool clip;
};

}  // namespace optimizers
}  // namespace tfscale

#endif  // TFSCALE_OPTIMIZERS_RULES_H_
