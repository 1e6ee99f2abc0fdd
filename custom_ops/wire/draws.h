// Random draws that depend only on a seed and on a position. They come from a hash, not from
// a generator with a state, so a buffer can be cut anywhere and all machines draw the same.
//
// A position's low 32 bits go through two rounds of multiply and xor-shift
// (constants: C. Wellons, "Prospecting for hash functions"), keyed by 64 bits
// that come from the seed and from the position's high half.
#ifndef TFSCALE_WIRE_DRAWS_H_
#define TFSCALE_WIRE_DRAWS_H_

#include "custom_ops/wire/block.h"

namespace tfscale {
namespace wire {
namespace {

struct Key {
  uint32_t first;
  uint32_t second;
};

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
inline uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

inline Key KeyOf(uint64_t seed, uint64_t high) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const uint64_t key = Mix(Mix(seed + kGolden) + (high + 1) * kGolden);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

inline void FillRange(Key key, uint32_t low, int count, uint32_t* __restrict draws) {
  for (int i = 0; i < count; ++i) {
    uint32_t h = (low + static_cast<uint32_t>(i)) ^ key.first;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15) ^ key.second) * 0x846ca68bu;
    draws[i] = h ^ (h >> 16);
  }
}

// Writes 32 random bits for each number of a block.
inline void FillDraws(Position position, uint32_t* __restrict draws) {
  const uint64_t high = position.first >> 32;
  const uint32_t low = static_cast<uint32_t>(position.first);
  const uint64_t before_carry = (uint64_t{1} << 32) - low;
  const Key key = KeyOf(position.seed, high);
  if (before_carry >= kBlock) return FillRange(key, low, kBlock, draws);
  const int split = static_cast<int>(before_carry);
  FillRange(key, low, split, draws);
  FillRange(KeyOf(position.seed, (high + 1) & 0xffffffffu), 0, kBlock - split, draws + split);
}

}  // namespace
}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_DRAWS_H_
