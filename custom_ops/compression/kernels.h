// The loops over rows of a matrix as tables of functions, one table for each
// instruction set. All tables give the same bits.
#ifndef TFSCALE_COMPRESSION_KERNELS_H_
#define TFSCALE_COMPRESSION_KERNELS_H_

#include <cstdint>

namespace tfscale {
namespace compression {

// g + rest; without a rest it is nullptr.
struct Matrix {
  const float* g;
  float* rest;
  int64_t rows;
  int64_t columns;
  int64_t rank;  // of the factors
};

struct Kernels {
  // Of rows [first, last); see low_rank.h. `own` is added to.
  void (*project)(const Matrix&, int64_t first, int64_t last, const float* factor, float* product);
  void (*back)(const Matrix&, int64_t first, int64_t last, const float* basis, float* own);
  void (*finish)(const Matrix&, int64_t first, int64_t last, const float* basis, const float* own,
                 const float* total, float* sum);
};

// Call the latter two only on a processor that can run them; they return nullptr
// where their instruction set is not compiled in.
const Kernels* BaseKernels();
const Kernels* Avx2Kernels();
const Kernels* Avx512Kernels();

}  // namespace compression
}  // namespace tfscale

#endif  // TFSCALE_COMPRESSION_KERNELS_H_
