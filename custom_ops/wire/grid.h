// int8, int4 and ternary: integers -L ... L behind a block's scale A / L, where
// A = max |x| of the block and L = 127, 7, 1.
//
// Bytes: n, ceil(n / 2), ceil(n / 4), and 4 ceil(n / 256) for the scales. The
//   first number of a byte is in its low bits; two's complement.
// Error: |x - d| <= max(A (1 / (2L) + 2^-21), 2^-118), and with 1 / L in place of
//   1 / (2L) for stochastic rounding.
//   The integer q nearest to v = x * (L / A) is off by at most 1/2, that is
//   A / (2L) after decoding. Every |v| is at most L (1 + 2^-22), so each of the
//   roundings of L / A, of the product, of A / L and of q A / L moves the result
//   by no more than about 2^-24 A: together less than 2^-21 A. Blocks with
//   A < 2^-118 become zeros, so that neither scale nor result is ever denormal.
// Stochastic: q = round(v + r), r uniform in (-1/2, 1/2), so E[q] = v. r has as
//   many bits as v + r can hold; what that and rounding leave of a bias is below
//   2^-21 A. Integers v stay what they are.
// NaN and Inf: the block's scale is NaN, so the whole block decodes to NaN.
// References: Alistarh et al., "QSGD", NeurIPS 2017; Wen et al., "TernGrad",
//   NeurIPS 2017.
#ifndef TFSCALE_WIRE_GRID_H_
#define TFSCALE_WIRE_GRID_H_

#include "custom_ops/wire/block.h"
#include "custom_ops/wire/draws.h"

namespace tfscale {
namespace wire {
namespace {

template <Format kFormat>
struct Grid {
  static constexpr int kBits = FactsOf(kFormat).bits;
  static constexpr int kScaleBytes = FactsOf(kFormat).scale_bytes;

  template <bool kStochastic>
  static void Encode(const float* __restrict x, int, Position position, uint8_t* __restrict out) {
    const uint32_t largest = LargestMagnitude(x);
    if (largest >= kInfinity) return EncodeUniform<Grid>(kNaN, out);
    if (largest < kFlush) return EncodeUniform<Grid>(0, out);
    const float amax = FromBits(largest);
    const float scale = amax / kL;
    uint8_t codes[kBlock];
    if (largest < kHuge) {
      Quantise<kStochastic>(x, amax, position, codes);
    } else {
      float quarter[kBlock];
      for (int i = 0; i < kBlock; ++i) quarter[i] = x[i] * 0.25f;
      Quantise<kStochastic>(quarter, amax * 0.25f, position, codes);
    }
    StoreScale(out, scale < LargestScale() ? scale : LargestScale());
    Pack(codes, out + kScaleBytes);
  }

  static void Decode(const uint8_t* __restrict in, float* __restrict v) {
    constexpr int32_t kHalf = 1 << (kBits - 1);
    const float scale = LoadScale(in);
    uint8_t codes[kBlock];
    Unpack(in + kScaleBytes, codes);
    for (int i = 0; i < kBlock; ++i) {
      const int32_t q = (static_cast<int32_t>(codes[i]) ^ kHalf) - kHalf;
      v[i] = static_cast<float>(q) * scale;
    }
  }

 private:
  static constexpr int kL = (1 << (kBits - 1)) - 1;
  static constexpr uint32_t kFlush = PowerBits(-118);
  static constexpr uint32_t kHuge = PowerBits(126);  // for larger A, 1 / A would be denormal
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  // A float above 2^23 has no fraction: adding this one rounds to nearest even
  // and leaves the integer, in two's complement, in the low bits.
  static constexpr float kRounder = 12582912.0f;

  // L times the scale must stay finite, no matter how A / L was rounded.
  static float LargestScale() { return FromBits(0x7f7fffff) / kL * (1 - 0x1p-23f); }

  static uint8_t CodeOf(float v) { return static_cast<uint8_t>(Bits(v + kRounder) & kMask); }

  template <bool kStochastic>
  static void Quantise(const float* __restrict x, float amax, Position position,
                       uint8_t* __restrict codes) {
    if (kStochastic) {
      QuantiseStochastic(x, kL / amax, position, codes);
    } else {
      QuantiseNearest(x, kL / amax, codes);
    }
  }

  static void QuantiseNearest(const float* __restrict x, float inverse, uint8_t* __restrict codes) {
    for (int i = 0; i < kBlock; ++i) codes[i] = CodeOf(x[i] * inverse);
  }

  static void QuantiseStochastic(const float* __restrict x, float inverse, Position position,
                                 uint8_t* __restrict codes) {
    // v + r must hold r's last bit when |v| = L, or L could round to L + 1.
    constexpr int kFractionBits = kL == 127 ? 17 : kL == 7 ? 21 : 23;
    constexpr float kUnit = 1.0f / (1 << kFractionBits);
    constexpr float kTop = kL;
    uint32_t draws[kBlock];
    FillDraws(position, draws);
    for (int i = 0; i < kBlock; ++i) {
      const int32_t odd = (static_cast<int32_t>(draws[i]) >> (32 - kFractionBits)) | 1;
      float v = x[i] * inverse;
      v = v < kTop ? v : kTop;
      v = v > -kTop ? v : -kTop;
      codes[i] = CodeOf(v + static_cast<float>(odd) * kUnit);
    }
  }

  static void Pack(const uint8_t* __restrict codes, uint8_t* __restrict out) {
    if constexpr (kBits == 8) {
      __builtin_memcpy(out, codes, kBlock);
    } else if constexpr (kBits == 4) {
      uint16_t pairs[kBlock / 2];
      __builtin_memcpy(pairs, codes, kBlock);
      for (int i = 0; i < kBlock / 2; ++i) out[i] = static_cast<uint8_t>(pairs[i] | pairs[i] >> 4);
    } else {
      uint32_t fours[kBlock / 4];
      __builtin_memcpy(fours, codes, kBlock);
      for (int i = 0; i < kBlock / 4; ++i) {
        const uint32_t c = fours[i];
        out[i] = static_cast<uint8_t>(c | c >> 6 | c >> 12 | c >> 18);
      }
    }
  }

  static void Unpack(const uint8_t* __restrict in, uint8_t* __restrict codes) {
    if constexpr (kBits == 8) {
      __builtin_memcpy(codes, in, kBlock);
    } else if constexpr (kBits == 4) {
      uint16_t pairs[kBlock / 2];
      for (int i = 0; i < kBlock / 2; ++i) {
        const uint32_t c = in[i];
        pairs[i] = static_cast<uint16_t>((c | c << 4) & 0x0f0f);
      }
      __builtin_memcpy(codes, pairs, kBlock);
    } else {
      uint32_t fours[kBlock / 4];
      for (int i = 0; i < kBlock / 4; ++i) {
        const uint32_t c = in[i];
        fours[i] = (c | c << 6 | c << 12 | c << 18) & 0x03030303;
      }
      __builtin_memcpy(codes, fours, kBlock);
    }
  }
};

}  // namespace
}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_GRID_H_
