// Loops over the rows of a matrix as tables of functions, one table for each
// instruction set. All tables give the same bits.
#ifndef TFSCALE_COMPRESSION_KERNELS_H_
#define TFSCALE_COMPRESSION_KERNELS_H_

#include <cstdint>

namespace tfscale {
namespace compression {

// The matrix g + rest; rest may be nullptr, for g alone.
struct Matrix {
  const float* g;
  float* rest;
  int64_t rows;
  int64_t columns;
  int64_t rank;  // rank of the factors
};

struct Kernels {
  // These functions handle rows [first, last); see low_rank.h. `back` adds to `own`.
  void (*project)(const Matrix&, int64_t first, int64_t last, const float* factor, float* product);
  void (*back)(const Matrix&, int64_t first, int64_t last, const float* basis, float* own);
  void (*finish)(const Matrix&, int64_t first, int64_t last, const float* basis, const float* own,
                 const float* total, float* sum);
};

// Call Avx2Kernels and Avx512Kernels only on a processor that can run them. They return
// nullptr if their instruction set is not compiled in.
const Kernels* BaseKernels();
const Kernels* Avx2Kernels();
const Kernels* Avx512Kernels();

}  // namespace compression
}  // namespace tfscale

#endif  // TFSCALE_COMPRESSION_KERNELS_H_
