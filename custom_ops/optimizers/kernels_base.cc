// The loops for what every processor of the architecture has: SSE2, NEON.
#include "custom_ops/optimizers/loops.h"

namespace tfscale {
namespace optimizers {

const Kernels* BaseKernels(Type type) { return KernelsFor(type); }

}  // namespace optimizers
}  // namespace tfscale
