// The k classes with the largest sums of values, one value of each repetition's buckets, exactly,
// without a matrix of classes times samples.
//
// Values become codes of 8 bits that are rounded up, so that a sum of codes is an upper bound of a
// sum of values. A row holds the codes of one bucket for up to 64 samples, so a scan of all classes
// reads one cache line for each repetition of a class. Only where the bound reaches the k-th best
// sum so far, it adds the values themselves.
//
// If the bucket whose value is farthest above its repetition's smallest one has k classes, the k-th
// best sum is at least that distance above the sum of smallest values. So the scan begins with
// this guess of the k-th best sum. If it was too high, which the result shows, another scan begins
// without a guess. By the same argument the bound is at most 1/254 of the distance too high for
// each repetition, whatever the values.
//
// A sum is that of float32 values, added in the order of repetitions. Of equal sums, the class
// with the smaller number is better. NaN is never among the best unless there are too few others.
#ifndef TFSCALE_SEARCH_SCAN_H_
#define TFSCALE_SEARCH_SCAN_H_

#include <cstdint>
#include <functional>

#include "custom_ops/search/kernels.h"
#include "custom_ops/wire/kernels.h"

namespace tfscale {
namespace search {

struct Problem {
  const float* values;    // [repetitions, samples, buckets]
  const int32_t* places;  // [classes, repetitions]: repetition * buckets + bucket
  int64_t repetitions;    // at most kMostRepetitions
  int64_t samples;
  int64_t buckets;
  int64_t classes;
  int64_t k;  // at most classes
};

// A Runner calls `work` with ranges [first, last) that cover [0, parts) once, on any threads. It
// returns when all calls have returned.
using Work = std::function<void(int64_t first, int64_t last)>;
using Runner = std::function<void(int64_t parts, const Work& work)>;

// Bytes that Best needs at `codes`, and how many classes make a part of a run.
int64_t CodeBytes(const Problem& problem);
inline constexpr int64_t kClassesOfPart = 4096;

// Writes sums and classes of the k best [samples, k], best first. Returns false if a place is not
// one of its repetition's buckets; then the output means nothing.
bool Best(const Problem& problem, uint8_t* codes, float* sums, int32_t* classes,
          const Runner& over_repetitions, const Runner& over_classes,
          wire::Level level = wire::ChosenLevel());

}  // namespace search
}  // namespace tfscale

#endif  // TFSCALE_SEARCH_SCAN_H_
