// The k largest of n numbers, exactly, at the speed at which memory is read.
//
// A sample gives a guess of a magnitude that a few more than k numbers reach. One pass over all
// numbers collects these few, and the search for the k-th number visits only them. A wrong guess
// costs time, but does not change the result: if the pass collects fewer than k numbers, another
// pass collects all numbers.
#ifndef TFSCALE_COMPRESSION_SELECT_H_
#define TFSCALE_COMPRESSION_SELECT_H_

#include <cstdint>

#include "custom_ops/compression/runner.h"

namespace tfscale {
namespace compression {

// Writes the places of the k largest magnitudes of x + rest in ascending order, and the numbers
// at these places. Of equal magnitudes, the first ones count. NaN is larger than infinity. `rest`
// may be nullptr, for x alone. 0 <= k <= n, and places fit into int32.
void Largest(const float* x, const float* rest, int64_t n, int64_t k, int32_t* places,
             float* numbers, const Runner& run);

// Sets rest to `kept` at the places, and to x + rest elsewhere.
void Keep(const float* x, float* rest, int64_t n, const int32_t* places, const float* kept,
          int64_t k, const Runner& run);

// Returns whether all places are in [0, size). Check places from peers, who may send anything.
bool AreWithin(const int32_t* places, int64_t count, int64_t size);

// Adds values to sums at valid places, one after the other.
void Add(const float* values, const int32_t* places, int64_t count, float* sums);

}  // namespace compression
}  // namespace tfscale

#endif  // TFSCALE_COMPRESSION_SELECT_H_
