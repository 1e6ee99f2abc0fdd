// The loops for AVX-512. The pragma comes after all other headers, so
// that nothing but the loops is compiled for it, and it holds to the end of
// the file, so that templates are instantiated under it.
#include <cstdint>

#include "custom_ops/compression/kernels.h"
#include "custom_ops/wire/codec.h"
#include "custom_ops/wire/kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,avx512f,avx512bw,avx512vl,avx512dq")
#endif

#include "custom_ops/compression/loops.h"

namespace tfscale {
namespace compression {

const Kernels* Avx512Kernels() { return &kKernels; }

}  // namespace compression
}  // namespace tfscale

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace tfscale {
namespace compression {

const Kernels* Avx512Kernels() { return nullptr; }

}  // namespace compression
}  // namespace tfscale

#endif
