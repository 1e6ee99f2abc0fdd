// PowerSGD's passes over a matrix M = g + rest, which is never stored.
//
// The factors are thin. A product and a basis have a row of `rank` numbers for each row of M. An
// own factor and a total factor are transposed: they have `rank` rows, with as many numbers as M
// has columns. Results depend only on the numbers, not on the number of threads or on the
// instruction set.
#ifndef TFSCALE_COMPRESSION_LOW_RANK_H_
#define TFSCALE_COMPRESSION_LOW_RANK_H_

#include <cstdint>

#include "custom_ops/compression/kernels.h"
#include "custom_ops/compression/runner.h"
#include "custom_ops/wire/kernels.h"

namespace tfscale {
namespace compression {

// product = M factor
void Project(const Matrix& m, const float* factor, float* product, const Runner& run,
             wire::Level level = wire::ChosenLevel());

// own = basis^T M. `sums` has room for Sums() factors.
int64_t Sums(const Matrix& m);
void ProjectBack(const Matrix& m, const float* basis, float* sums, float* own, const Runner& run,
                 wire::Level level = wire::ChosenLevel());

// rest = M - basis own, unless own is nullptr; sum = basis total. `sum` may be g itself.
void Finish(const Matrix& m, const float* basis, const float* own, const float* total, float* sum,
            const Runner& run, wire::Level level = wire::ChosenLevel());

}  // namespace compression
}  // namespace tfscale

#endif  // TFSCALE_COMPRESSION_LOW_RANK_H_
