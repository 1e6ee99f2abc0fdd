// Types of variables: Widen converts a stored number to float32, Narrow rounds back to nearest
// even. NaN and Inf stay NaN and Inf.
//
// As in wire/block.h, everything has internal linkage and nothing uses the
// standard library. Results do not depend on the treatment of denormals, either:
// TensorFlow's threads flush denormals of float32, and those of float16 must not get lost.
#ifndef TFSCALE_OPTIMIZERS_NUMBERS_H_
#define TFSCALE_OPTIMIZERS_NUMBERS_H_

#include <cstdint>

#include "custom_ops/wire/block.h"

namespace tfscale {
namespace optimizers {
namespace {

using wire::Bits;
using wire::FromBits;
using wire::kInfinity;
using wire::kMagnitude;
using wire::PowerBits;
using wire::SelectLess;

struct Float32 {
  using Stored = float;
  static float Widen(float x) { return x; }
  static float Narrow(float x) { return x; }
};

struct Bfloat16 {
  using Stored = uint16_t;

  static float Widen(uint16_t x) { return FromBits(static_cast<uint32_t>(x) << 16); }

  static uint16_t Narrow(float x) {
    constexpr uint32_t kQuietNaN = 0x7fc0;
    const uint32_t bits = Bits(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>(
        SelectLess(kInfinity, bits & kMagnitude, (bits >> 16 & 0x8000) | kQuietNaN, rounded));
  }
};

struct Float16 {
  using Stored = uint16_t;

  static float Widen(uint16_t x) {
    const uint32_t code = x & 0x7fffu;
    const uint32_t tiny = Bits(static_cast<float>(static_cast<int32_t>(code)) * kLeast);
    const uint32_t normal = (code << kShift) + kRebias;
    const uint32_t special = normal + kRebias;
    const uint32_t finite = SelectLess(code, kLeastNormal, tiny, normal);
    const uint32_t magnitude = SelectLess(code, kInfiniteCode, finite, special);
    return FromBits(magnitude | static_cast<uint32_t>(x & 0x8000) << 16);
  }

  // Adding the anchor, whose last place is worth one step of the result's mantissa,
  // rounds to nearest even and leaves the mantissa, hidden bit included, in the low
  // bits. A mantissa that rounds up to the next power of two carries into the exponent;
  // beyond the largest number, this gives Inf.
  static uint16_t Narrow(float x) {
    const uint32_t all = Bits(x) & kMagnitude;
    const uint32_t magnitude = SelectLess(all, kTooLarge, all, kTooLarge);
    const uint32_t power = magnitude & kInfinity;
    const uint32_t exponent = SelectLess(power, kSmallestNormal, kSmallestNormal, power);
    const uint32_t anchor = exponent + (kShift << 23);
    const uint32_t mantissa = Bits(FromBits(magnitude) + FromBits(anchor)) - anchor;
    const uint32_t number = ((exponent - kSmallestNormal) >> kShift) + mantissa;
    const uint32_t code = SelectLess(kInfinity, all, kQuietNaN, number);
    return static_cast<uint16_t>(code | (Bits(x) >> 16 & 0x8000));
  }

 private:
  static constexpr int kShift = 23 - 10;
  static constexpr uint32_t kRebias = (127 - 15) << 23;
  static constexpr uint32_t kSmallestNormal = PowerBits(-14);
  static constexpr uint32_t kTooLarge = PowerBits(16);
  static constexpr uint32_t kLeastNormal = 0x0400;
  static constexpr uint32_t kInfiniteCode = 0x7c00;
  static constexpr uint32_t kQuietNaN = 0x7e00;
  static constexpr float kLeast = 0x1p-24f;
};

}  // namespace
}  // namespace optimizers
}  // namespace tfscale

#endif  // TFSCALE_OPTIMIZERS_NUMBERS_H_
