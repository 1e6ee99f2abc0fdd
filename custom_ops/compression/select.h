// The k largest of n numbers, exactly, at the speed at which memory is read.
//
// A sample guesses a magnitude that a few more than k numbers reach. One pass over all collects
// those, and only among these few the k-th is looked for. A wrong guess costs time and changes
// nothing: if fewer than k were collected, all are.
#ifndef TFSCALE_COMPRESSION_SELECT_H_
#define TFSCALE_COMPRESSION_SELECT_H_

#include <cstdint>

#include "custom_ops/compression/runner.h"

namespace tfscale {
namespace compression {

// Writes the places of the k largest magnitudes of x + rest in ascending order, and the numbers
// that are there. Of equal ones the first count; NaN is larger than infinity, and that than all
// numbers. Without a rest it is nullptr. 0 <= k <= n, and places fit into int32.
void Largest(const float* x, const float* rest, int64_t n, int64_t k, int32_t* places,
             float* numbers, const Runner& run);

// rest = x + rest, but for the places, which get `kept`.
void Keep(const float* x, float* rest, int64_t n, const int32_t* places, const float* kept,
          int64_t k, const Runner& run);

// Whether all places are in [0, size): peers send them.
bool AreWithin(const int32_t* places, int64_t count, int64_t size);

// Adds values to sums at places that are within it, one after the other.
void Add(const float* values, const int32_t* places, int64_t count, float* sums);

}  // namespace compression
}  // namespace tfscale

#endif  // TFSCALE_COMPRESSION_SELECT_H_
