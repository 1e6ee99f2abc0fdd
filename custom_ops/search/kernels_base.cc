// The loops for what every processor of the architecture has: SSE2, NEON.
#include "custom_ops/search/loops.h"

namespace tfscale {
namespace search {

const Kernels* BaseKernels() { return AllKernels(); }

}  // namespace search
}  // namespace tfscale
