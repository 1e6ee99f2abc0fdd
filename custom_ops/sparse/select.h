// The k largest of n numbers, exactly, at the speed at which memory is read.
//
// A sample guesses a magnitude that a few more than k numbers reach. One pass over all collects
// those, and only among these few the k-th is looked for. A wrong guess costs time and changes
// nothing: if fewer than k were collected, all are.
#ifndef TFSCALE_SPARSE_SELECT_H_
#define TFSCALE_SPARSE_SELECT_H_

#include <cstdint>
#include <functional>

namespace tfscale {
namespace sparse {

// Calls work(first, last) for parts of [0, parts), perhaps in several threads, and waits.
using Runner =
    std::function<void(int64_t parts, const std::function<void(int64_t first, int64_t last)>&)>;

// Writes the places of the k largest magnitudes, plus offset, in ascending order.
// Of equal ones the first count; NaN is larger than infinity, and that than all numbers.
// 0 <= k <= n, and places fit into int32.
void Largest(const float* x, int64_t n, int64_t k, int32_t offset, int32_t* places,
             const Runner& run);

// Adds values to sums at places, one after the other. False if a place is not in [0, size): then
// nothing has been added.
bool Add(const float* values, const int32_t* places, int64_t count, float* sums, int64_t size);

}  // namespace sparse
}  // namespace tfscale

#endif  // TFSCALE_SPARSE_SELECT_H_
