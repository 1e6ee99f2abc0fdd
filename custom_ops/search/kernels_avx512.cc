// The loops for AVX-512. The pragma comes after all other headers, so
// that nothing but the loops is compiled for it, and it holds to the end of
// the file, so that templates are instantiated under it.
#include <cstdint>

#include "custom_ops/search/kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,avx512f,avx512bw,avx512vl,avx512dq")
#endif

#include "custom_ops/search/loops.h"

namespace tfscale {
namespace search {

const Kernels* Avx512Kernels() { return AllKernels(); }

}  // namespace search
}  // namespace tfscale

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace tfscale {
namespace search {

const Kernels* Avx512Kernels() { return nullptr; }

}  // namespace search
}  // namespace tfscale

#endif
