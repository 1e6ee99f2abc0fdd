// One step of LAMB or LARS for one variable, in two passes over its memory.
//
// LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020),
// with phi(x) = min(max(x, lower), upper):
//   m = beta_1 m + rest_1 g
//   v = beta_2 v + rest_2 g^2
//   u = correction_1 m / (sqrt(correction_2 v) + epsilon) + weight_decay w
//   w = w - learning_rate phi(|w|) / |u| u
// LARS (You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks",
// 2017), with r = learning_rate inside the momentum or outside of it:
//   d = g + weight_decay w
//   ratio = trust |w| / (|g| + weight_decay |w| + epsilon)
//   ratio = min(ratio / learning_rate, 1)                             if clipped
//   m = momentum m + r_inside ratio d
//   w = w - r_outside (Nesterov: momentum m + r_inside ratio d; else m)
// The ratio is 1 without `adapt`, or if one of its norms is 0 or NaN.
//
// The first pass computes LAMB's moments and the norms. The second pass moves w; it
// computes u again, which is faster than to store it. Arithmetic is float32; norms are
// added in float64. Results depend only on the numbers, not on the number of threads or
// on the instruction set.
#ifndef TFSCALE_OPTIMIZERS_UPDATE_H_
#define TFSCALE_OPTIMIZERS_UPDATE_H_

#include <cstdint>
#include <functional>

#include "custom_ops/optimizers/kernels.h"
#include "custom_ops/optimizers/rules.h"
#include "custom_ops/wire/kernels.h"

namespace tfscale {
namespace optimizers {

// A variable is cut into blocks of this many numbers.
inline constexpr int64_t kBlock = 16384;

// A Runner calls `work` with ranges [first, last) that cover [0, blocks) once, on any threads.
// It returns when all calls have returned.
using Work = std::function<void(int64_t first, int64_t last)>;
using Runner = std::function<void(int64_t blocks, const Work& work)>;

// Returns the table for a type at a level, which must be available.
const Kernels& KernelsAt(wire::Level level, Type type);

void Lamb(const LambNumbers& rule, bool adapt, Type type, const Arrays& arrays, const Runner& run,
          wire::Level level = wire::ChosenLevel());

void Lars(const LarsNumbers& rule, const LarsSwitches& switches, Type type, const Arrays& arrays,
          const Runner& run, wire::Level level = wire::ChosenLevel());

}  // namespace optimizers
}  // namespace tfscale

#endif  // TFSCALE_OPTIMIZERS_UPDATE_H_
