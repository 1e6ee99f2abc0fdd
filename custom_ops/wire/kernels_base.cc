// The formats for the instruction set that every processor of the architecture has: SSE2, NEON.
#include "custom_ops/wire/formats.h"

namespace tfscale {
namespace wire {

const Kernels* BaseKernels(Format format) { return KernelsFor(format); }

}  // namespace wire
}  // namespace tfscale
