// PowerSGD's passes over a matrix M = g + rest, whose sum is never stored.
//
// The factors are thin: a product and a basis have a row of `rank` numbers for each row of M, and
// an own or a total factor, transposed, has `rank` rows of as many numbers as M has columns.
// Results depend on nothing but the numbers: not on how many threads there are, nor on the
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

// own = basis^T M. `sums` has room for as many factors as Sums() says.
int64_t Sums(const Matrix& m);
void ProjectBack(const Matrix& m, const float* basis, float* sums, float* own, const Runner& run,
                 wire::Level level = wire::ChosenLevel());

// rest = M - basis own, unless own is nullptr; sum = basis total, which may be g itself.
void Finish(const Matrix& m, const float* basis, const float* own, const float* total, float* sum,
            const Runner& run, wire::Level level = wire::ChosenLevel());

}  // namespace compression
}  // namespace tfscale

#endif  // TFSCALE_COMPRESSION_LOW_RANK_H_
