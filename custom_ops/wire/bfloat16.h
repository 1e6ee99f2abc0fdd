// bf16: the upper half of an fp32, rounded to nearest even.
//
// Bytes: 2n. No scale.
// Error: |x - d| <= max(2^-8 |x|, 2^-134).
//   A normal number keeps 8 significant bits, so half a unit in the last place
//   is at most 2^-8 |x|; a denormal one is a multiple of 2^-133. A number above
//   the largest bf16, M = 2^128 (1 - 2^-8), is saturated to M, so that what was
//   finite stays finite: |x - M| <= 2^120 - 2^104 < 2^-8 |x| there.
// Stochastic: |x - d| <= max(2^-7 |x|, 2^-133), E[d] = x exactly for |x| <= M:
//   16 random bits are added to the 16 that are cut off.
// NaN and Inf: kept, number by number.
// Reference: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training",
//   2019.
#ifndef TFSCALE_WIRE_BFLOAT16_H_
#define TFSCALE_WIRE_BFLOAT16_H_

#include "custom_ops/wire/block.h"
#include "custom_ops/wire/draws.h"

namespace tfscale {
namespace wire {
namespace {

struct Bfloat16 {
  static constexpr int kBits = FactsOf(Format::kBf16).bits;
  static constexpr int kScaleBytes = FactsOf(Format::kBf16).scale_bytes;

  template <bool kStochastic>
  static void Encode(const float* __restrict x, int, Position position, uint8_t* __restrict out) {
    uint32_t draws[kBlock];
    uint16_t codes[kBlock];
    if (kStochastic) FillDraws(position, draws);
    if (LargestMagnitude(x) < kLargest << 16) {
      for (int i = 0; i < kBlock; ++i) {
        codes[i] = static_cast<uint16_t>((Bits(x[i]) + Round<kStochastic>(x[i], draws + i)) >> 16);
      }
    } else {
      for (int i = 0; i < kBlock; ++i) {
        codes[i] = CodeOf(Bits(x[i]), Round<kStochastic>(x[i], draws + i));
      }
    }
    __builtin_memcpy(out, codes, sizeof(codes));
  }

  static void Decode(const uint8_t* __restrict in, float* __restrict v) {
    uint16_t codes[kBlock];
    __builtin_memcpy(codes, in, sizeof(codes));
    for (int i = 0; i < kBlock; ++i) v[i] = FromBits(static_cast<uint32_t>(codes[i]) << 16);
  }

 private:
  static constexpr uint32_t kLargest = 0x7f7f;
  static constexpr uint32_t kQuiet = 0x40;  // keeps a NaN from becoming Inf

  // Returns the number to add before the lower half is cut off.
  template <bool kStochastic>
  static uint32_t Round(float x, const uint32_t* draw) {
    return kStochastic ? *draw >> 16 : 0x7fff + (Bits(x) >> 16 & 1);
  }

  // Encodes any number, also one that saturates, NaN or Inf.
  static uint16_t CodeOf(uint32_t bits, uint32_t round) {
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t rounded = (magnitude + round) >> 16;
    const uint32_t finite = SelectLess(rounded, kLargest, rounded, kLargest);
    const uint32_t special = magnitude >> 16 | SelectLess(kInfinity, magnitude, kQuiet, 0);
    const uint32_t code = SelectLess(magnitude, kInfinity, finite, special);
    return static_cast<uint16_t>(code | (bits >> 16 & 0x8000));
  }
};

}  // namespace
}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_BFLOAT16_H_
