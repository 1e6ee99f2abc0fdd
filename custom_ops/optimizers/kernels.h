// The loops over a variable's numbers as tables of functions, one table for each
// instruction set. All tables give the same bits.
#ifndef TFSCALE_OPTIMIZERS_KERNELS_H_
#define TFSCALE_OPTIMIZERS_KERNELS_H_

#include <cstdint>

#include "custom_ops/optimizers/rules.h"

namespace tfscale {
namespace optimizers {

// What variable and gradient are stored as. State is float32.
enum class Type : uint8_t { kFloat32, kBfloat16, kFloat16 };

// A variable, its gradient and its state, or a part of them. None overlaps another.
struct Arrays {
  void* w;
  const void* g;
  float* m;
  float* v;  // LAMB only
  int64_t count;
};

struct SquaredNorms {
  double weights;
  double other;  // of LAMB's direction, of LARS's gradient
};

// LARS's d = g + weight_decay w goes into the momentum times `scale`, and the
// outcome into the variable times `outer`.
struct LarsStep {
  float momentum;
  float weight_decay;
  float scale;
  float outer;
  bool nesterov;
};

struct Kernels {
  void (*lamb_moments)(const LambNumbers&, const Arrays&, SquaredNorms*);
  void (*lamb_update)(const LambNumbers&, float step, const Arrays&);
  void (*lars_norms)(const Arrays&, SquaredNorms*);
  void (*lars_update)(const LarsStep&, const Arrays&);
};

// Call the latter two only on a processor that can run them; they return nullptr
// where their instruction set is not compiled in.
const Kernels* BaseKernels(Type type);
const Kernels* Avx2Kernels(Type type);
const Kernels* Avx512Kernels(Type type);

}  // namespace optimizers
}  // namespace tfscale

#endif  // TFSCALE_OPTIMIZERS_KERNELS_H_
