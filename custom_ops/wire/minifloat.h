// fp16 and fp8: small floating-point numbers behind a power of two.
//
// A block's scale is 2^-k; the payload holds x 2^k, rounded to nearest even.
// Scaling by a power of two is exact, and encoding what was decoded gives the
// same bytes again.
//
//        payload                    max |x| of a block is brought into
//   fp16 IEEE binary16              [2^14, 2^15)
//   fp8  OCP E4M3 (OFP8, 2023)      (224, 448]: all of the range is used
//
// Bytes: fp16 2n + 4 ceil(n / 256); fp8 n + 4 ceil(n / 256).
// Error, with A = max |x| of the block:
//   fp16 |x - d| <= max(2^-11 |x|, 2^-39 A, 2^-127)
//   fp8  |x - d| <= max(2^-4 |x|, A / 229376, 2^-127)
//   A code with m mantissa bits rounds normal numbers by at most 2^-(m+1) |x|
//   and smaller ones by half of its least number u: 2^-k u / 2. Here u is 2^-24
//   or 2^-9, and 2^-k <= 2^-14 A or < A / 224. k stops at 126 + log2(u), so that
//   the least decoded number is 2^-126 and decoding never meets a denormal: then
//   2^-k u / 2 = 2^-127 (2^-126 if the encoding processor takes denormal x for
//   0). Numbers above the largest finite result L, (2 - 2^-m) 2^127, saturate, so
//   that what was finite stays finite; |x - L| < 2^-(m+1) |x| there too.
// NaN and Inf: the block's scale is NaN, so the whole block decodes to NaN. The
//   payload's own Inf and NaN codes never occur, and decode as if they were
//   ordinary numbers.
// Stochastic rounding is ignored.
// References: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; OCP
//   8-bit Floating Point Specification 1.0, 2023; for power-of-two block scales
//   OCP Microscaling Formats 1.0, 2023.
#ifndef TFSCALE_WIRE_MINIFLOAT_H_
#define TFSCALE_WIRE_MINIFLOAT_H_

#include "custom_ops/wire/block.h"

namespace tfscale {
namespace wire {
namespace {

struct Binary16 {
  static constexpr Format kFormat = Format::kFp16;
  using Code = uint16_t;
  static constexpr int kMantissaBits = 10;
  static constexpr int kExponentBias = 15;
  static constexpr int kTopExponent = 14;
  static constexpr uint32_t kTopMantissa = 0x7fffff;
};

struct E4M3 {
  static constexpr Format kFormat = Format::kFp8;
  using Code = uint8_t;
  static constexpr int kMantissaBits = 3;
  static constexpr int kExponentBias = 7;
  static constexpr int kTopExponent = 8;
  static constexpr uint32_t kTopMantissa = 0x600000;  // 1.75 * 2^8 = 448
};

template <class Layout>
struct Minifloat {
  using Code = typename Layout::Code;
  static constexpr int kBits = FactsOf(Layout::kFormat).bits;
  static constexpr int kScaleBytes = FactsOf(Layout::kFormat).scale_bytes;
  static_assert(kBits == 8 * sizeof(Code), "a code fills its type");

  template <bool kStochastic>
  static void Encode(const float* __restrict x, int, Position, uint8_t* __restrict out) {
    const uint32_t largest = LargestMagnitude(x);
    if (largest >= kInfinity) return EncodeUniform<Minifloat>(kNaN, out);
    if (largest <= kLargest) return EncodeFinite(x, largest, out);
    float saturated[kBlock];
    Saturate(x, saturated);
    EncodeFinite(saturated, kLargest, out);
  }

  static void Decode(const uint8_t* __restrict in, float* __restrict v) {
    const float scale = LoadScale(in);
    Code codes[kBlock];
    __builtin_memcpy(codes, in + kScaleBytes, sizeof(codes));
    for (int i = 0; i < kBlock; ++i) v[i] = ValueOf(codes[i]) * scale;
  }

 private:
  static constexpr int kShift = 23 - Layout::kMantissaBits;
  static constexpr int kUnitExponent = 1 - Layout::kExponentBias - Layout::kMantissaBits;
  static constexpr uint32_t kSmallestNormal = PowerBits(1 - Layout::kExponentBias);
  static constexpr uint32_t kLargest = 0x7f7fffff >> kShift << kShift;
  static constexpr uint32_t kSignBit = 1u << (kBits - 1);

  static int ScaleExponent(uint32_t largest) {
    const int exponent = static_cast<int>(largest >> 23) - 127;
    const bool above = (largest & 0x7fffff) > Layout::kTopMantissa;
    const int k = Layout::kTopExponent - exponent - above;
    return k < 126 + kUnitExponent ? k : 126 + kUnitExponent;
  }

  static void EncodeFinite(const float* __restrict x, uint32_t largest, uint8_t* __restrict out) {
    const int k = ScaleExponent(largest);
    const float up = FromBits(PowerBits(k));
    Code codes[kBlock];
    for (int i = 0; i < kBlock; ++i) codes[i] = CodeOf(x[i] * up);
    StoreScale(out, FromBits(PowerBits(-k)));
    __builtin_memcpy(out + kScaleBytes, codes, sizeof(codes));
  }

  static void Saturate(const float* __restrict x, float* __restrict y) {
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t magnitude = Bits(x[i]) & kMagnitude;
      const uint32_t sign = Bits(x[i]) & ~kMagnitude;
      y[i] = FromBits(SelectLess(magnitude, kLargest, magnitude, kLargest) | sign);
    }
  }

  // The anchor is a float whose last place is worth one step of the code's mantissa
  // at y: adding it rounds to nearest even, and leaves the mantissa, hidden bit
  // included, in the low bits. A mantissa that rounds up to the next power of two
  // carries into the exponent, as it should. Below the normal numbers the step
  // stays constant. The result does not depend on the treatment of denormals.
  static Code CodeOf(float y) {
    const uint32_t magnitude = Bits(y) & kMagnitude;
    const uint32_t exponent = Max(magnitude & kInfinity, kSmallestNormal);
    const uint32_t anchor = exponent + (kShift << 23);
    const uint32_t mantissa = Bits(FromBits(magnitude) + FromBits(anchor)) - anchor;
    const uint32_t code = ((exponent - kSmallestNormal) >> kShift) + mantissa;
    return static_cast<Code>(code | (Bits(y) >> (32 - kBits) & kSignBit));
  }

  // Inverts CodeOf: returns the mantissa with its hidden bit, times the step.
  static float ValueOf(uint32_t code) {
    constexpr uint32_t kHidden = 1u << Layout::kMantissaBits;
    const uint32_t magnitude = code & (kSignBit - 1);
    const uint32_t exponent = Max(magnitude & ~(kHidden - 1), kHidden);
    const float mantissa = static_cast<float>(static_cast<int32_t>(magnitude - exponent + kHidden));
    const uint32_t step = ((exponent - kHidden) << kShift) + PowerBits(kUnitExponent);
    const uint32_t sign = (code & kSignBit) << (32 - kBits);
    return mantissa * FromBits(step | sign);
  }
};

}  // namespace
}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_MINIFLOAT_H_
