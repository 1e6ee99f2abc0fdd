// The loops for what every processor of the architecture has: SSE2, NEON.
#include "custom_ops/compression/loops.h"

namespace tfscale {
namespace compression {

const Kernels* BaseKernels() { return &kKernels; }

}  // namespace compression
}  // namespace tfscale
