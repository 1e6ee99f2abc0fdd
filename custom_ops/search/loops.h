// The loops of kernels.h. Each kernels_*.cc compiles them for its instruction set; the rules of
// wire/block.h apply.
#ifndef TFSCALE_SEARCH_LOOPS_H_
#define TFSCALE_SEARCH_LOOPS_H_

#include <cstdint>

#include "custom_ops/search/kernels.h"
#include "custom_ops/wire/independent.h"

namespace tfscale {
namespace search {
namespace {

constexpr int64_t kAhead = 6;  // classes whose rows are asked for early

template <int kLanes>
inline const uint8_t* Row(const uint8_t* codes, int32_t place) {
  return codes + static_cast<int64_t>(place) * kLanes;
}

// Adds four rows at a time, since each addition to `sums` reads and writes them.
template <int kLanes>
inline void AddFour(const uint8_t* codes, const int32_t* places, uint16_t* sums) {
  const uint8_t* a = Row<kLanes>(codes, places[0]);
  const uint8_t* b = Row<kLanes>(codes, places[1]);
  const uint8_t* c = Row<kLanes>(codes, places[2]);
  const uint8_t* d = Row<kLanes>(codes, places[3]);
  TFSCALE_INDEPENDENT
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t pairs = static_cast<uint16_t>(a[i] + b[i]);
    sums[i] = static_cast<uint16_t>(sums[i] + pairs + static_cast<uint16_t>(c[i] + d[i]));
  }
}

template <int kLanes>
inline void AddOne(const uint8_t* codes, const int32_t* places, uint16_t* sums) {
  const uint8_t* a = Row<kLanes>(codes, places[0]);
  TFSCALE_INDEPENDENT
  for (int i = 0; i < kLanes; ++i) sums[i] = static_cast<uint16_t>(sums[i] + a[i]);
}

template <int kLanes>
int64_t Reach(const uint8_t* codes, const int32_t* places, int64_t repetitions, int64_t classes,
              const uint16_t* limits, int32_t* found, uint16_t* sums) {
  int64_t count = 0;
  for (int64_t c = 0; c < classes; ++c, places += repetitions) {
    if (c + kAhead < classes) {
      const int32_t* ahead = places + kAhead * repetitions;
      for (int64_t r = 0; r < repetitions; ++r) __builtin_prefetch(Row<kLanes>(codes, ahead[r]));
    }
    alignas(64) uint16_t total[kLanes] = {};
    int64_t r = 0;
    for (; r + 4 <= repetitions; r += 4) AddFour<kLanes>(codes, places + r, total);
    for (; r < repetitions; ++r) AddOne<kLanes>(codes, places + r, total);
    uint16_t reached = 0;
    for (int i = 0; i < kLanes; ++i) reached |= total[i] >= limits[i] ? 1 : 0;
    if (reached == 0) continue;
    found[count] = static_cast<int32_t>(c);
    __builtin_memcpy(sums + count * kLanes, total, sizeof(total));
    ++count;
  }
  return count;
}

const Kernels* AllKernels() {
  static const Kernels kernels = {Reach<kMany>, Reach<kFew>};
  return &kernels;
}

}  // namespace
}  // namespace search
}  // namespace tfscale

#endif  // TFSCALE_SEARCH_LOOPS_H_
