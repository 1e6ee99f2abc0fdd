// Loops over a variable's numbers as tables of functions, one table for each
// instruction set. All tables give the same bits.
#ifndef TFSCALE_OPTIMIZERS_KERNELS_H_
#define TFSCALE_OPTIMIZERS_KERNELS_H_

#include <cstdint>

#include "custom_ops/optimizers/rules.h"

namespace tfscale {
namespace optimizers {

// Type of a variable and its gradient. State is float32.
enum class Type : uint8_t { kFloat32, kBfloat16, kFloat16 };

// A variable, its gradient and its state, or a part of each. The arrays do not overlap.
struct Arrays {
  void* w;
  const void* g;
  float* m;
  float* v;  // LAMB only
  int64_t count;
};

struct SquaredNorms {
  double weights;
  double other;  // squared norm of LAMB's direction or of LARS's gradient
};

// The momentum adds `scale` times d = g + weight_decay w; the variable moves by `outer` times the
// result.
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

// Call Avx2Kernels and Avx512Kernels only on a processor that can run them. They return
// nullptr if their instruction set is not compiled in.
const Kernels* BaseKernels(Type type);
const Kernels* Avx2Kernels(Type type);
const Kernels* Avx512Kernels(Type type);

}  // namespace optimizers
}  // namespace tfscale

#endif  // TFSCALE_OPTIMIZERS_KERNELS_H_
