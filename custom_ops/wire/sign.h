// sign: one bit for each number, and a block's mean |x| as its magnitude.
//
// Bytes: ceil(n / 8) + 4 ceil(n / 256). Bit i % 8 of byte i / 8 is set if x_i is
//   negative; +0 counts as positive, -0 as negative.
// Error: |x - d| <= max(A, 2^-126), A = max |x| of the block: |d| is the block's
//   mean, or 0 if that is below 2^-126; |x| and |d| are then both in [0, A] and
//   have the same sign. Over a block of c numbers, sum (x - d)^2 is
//   sum x^2 - c mean^2, up to float rounding: never worse than sending nothing,
//   which is what error feedback needs.
// The mean is summed in 16 lanes, then pairwise, the same on every processor;
//   blocks that could overflow are scaled by 2^-8 meanwhile.
// NaN and Inf: the block's scale is NaN, so the whole block decodes to NaN.
// Stochastic rounding is ignored.
// References: Bernstein et al., "signSGD", ICML 2018; Karimireddy et al., "Error
//   Feedback Fixes SignSGD", ICML 2019.
#ifndef TFSCALE_WIRE_SIGN_H_
#define TFSCALE_WIRE_SIGN_H_

#include "custom_ops/wire/block.h"

namespace tfscale {
namespace wire {
namespace {

struct Sign {
  static constexpr int kBits = FactsOf(Format::kSign).bits;
  static constexpr int kScaleBytes = FactsOf(Format::kSign).scale_bytes;

  template <bool kStochastic>
  static void Encode(const float* __restrict x, int count, Position, uint8_t* __restrict out) {
    const uint32_t largest = LargestMagnitude(x);
    if (largest >= kInfinity) return EncodeUniform<Sign>(kNaN, out);
    StoreScale(out, MeanMagnitude(x, count, largest));
    uint8_t negative[kBlock];
    for (int i = 0; i < kBlock; ++i) negative[i] = static_cast<uint8_t>(Bits(x[i]) >> 31);
    for (int i = 0; i < kBlock / 8; ++i) out[kScaleBytes + i] = Gather(negative + 8 * i);
  }

  static void Decode(const uint8_t* __restrict in, float* __restrict v) {
    const uint32_t scale = Bits(LoadScale(in));
    uint8_t signs[kBlock];
    for (int i = 0; i < kBlock / 8; ++i) Scatter(in[kScaleBytes + i], signs + 8 * i);
    for (int i = 0; i < kBlock; ++i) v[i] = FromBits(scale ^ static_cast<uint32_t>(signs[i]) << 24);
  }

 private:
  static float MeanMagnitude(const float* __restrict x, int count, uint32_t largest) {
    constexpr int kLanes = 16;
    const bool huge = largest >= PowerBits(119);
    const float down = huge ? 0x1p-8f : 1.0f;
    const float up = huge ? 0x1p8f : 1.0f;
    float sum[kLanes] = {};
    for (int i = 0; i < kBlock; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        sum[lane] += FromBits(Bits(x[i + lane]) & kMagnitude) * down;
      }
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) sum[lane] += sum[lane + half];
    }
    const float mean = sum[0] / static_cast<float>(count) * up;
    const float bounded = mean < FromBits(largest) ? mean : FromBits(largest);
    return bounded < 0x1p-126f ? 0.0f : bounded;
  }

  // Eight bytes of 0 or 1 to eight bits: the multiplication shifts byte j's bit
  // to bit 56 + j, and no two of its partial products meet.
  static uint8_t Gather(const uint8_t* bytes) {
    uint64_t word;
    __builtin_memcpy(&word, bytes, sizeof(word));
    return static_cast<uint8_t>(word * 0x0102040810204080u >> 56);
  }

  // Eight bits to eight bytes of 0 or 0x80: byte j keeps bit j of its copy, and
  // the addition carries it up to the byte's highest bit.
  static void Scatter(uint8_t bits, uint8_t* bytes) {
    const uint64_t kept = bits * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t word = (kept + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u;
    __builtin_memcpy(bytes, &word, sizeof(word));
  }
};

}  // namespace
}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_SIGN_H_
