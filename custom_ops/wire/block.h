// Code that all block formats share: bits, magnitudes, and the driver that walks
// over a buffer block by block.
//
// Each kernels_*.cc compiles this file, and the format files, for its own
// instruction set. So everything here has internal linkage, and nothing here
// uses the standard library: otherwise the linker could keep an inline function that
// was compiled for AVX-512, for all instruction sets.
//
// A format is a struct with
//   kBits, kScaleBytes   payload bits for each number; bytes of a block's scale
//   Encode<stochastic>(x, count, position, out)   exactly kBlock numbers, of
//                        which the first `count` are real and the others 0
//   Decode(in, v)        exactly kBlock numbers
// Fixed sizes let the compiler vectorise without epilogues; a short last block
// goes through a padded copy.
#ifndef TFSCALE_WIRE_BLOCK_H_
#define TFSCALE_WIRE_BLOCK_H_

#include <cstdint>

#include "custom_ops/wire/codec.h"
#include "custom_ops/wire/independent.h"
#include "custom_ops/wire/kernels.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bytes on the wire are little-endian");

namespace tfscale {
namespace wire {
namespace {

constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kNaN = 0x7fc00000;
constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr int kMaxBlockBytes = 4 + 2 * kBlock;

// Position of a block in the stream of random draws.
struct Position {
  uint64_t seed;
  uint64_t first;
};

inline uint32_t Bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FromBits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Returns a < b ? yes : no, for magnitudes. It uses masks, since g++ turns a conditional
// expression into branches, which it cannot vectorise.
inline uint32_t SelectLess(uint32_t a, uint32_t b, uint32_t yes, uint32_t no) {
  const uint32_t mask = static_cast<uint32_t>(static_cast<int32_t>(a - b) >> 31);
  return no ^ ((yes ^ no) & mask);
}

// Returns the larger magnitude. It compares signed integers, as SSE2 and AVX2 only can.
inline uint32_t Max(uint32_t a, uint32_t b) {
  return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b;
}

// Returns the bits of 2^exponent, for normal numbers.
constexpr uint32_t PowerBits(int exponent) { return static_cast<uint32_t>(127 + exponent) << 23; }

// Returns the bits of a block's max |x|. Magnitudes are ordered like their bits, and a
// block with NaN or Inf gives kInfinity or more.
inline uint32_t LargestMagnitude(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int32_t magnitude = static_cast<int32_t>(Bits(x[i]) & kMagnitude);
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<uint32_t>(largest);
}

inline void StoreScale(uint8_t* out, float scale) { __builtin_memcpy(out, &scale, sizeof(scale)); }

inline float LoadScale(const uint8_t* in) {
  float scale;
  __builtin_memcpy(&scale, in, sizeof(scale));
  return scale;
}

// Encodes a block of zeros (scale 0) or of NaN (scale NaN).
template <class Format>
void EncodeUniform(uint32_t scale_bits, uint8_t* out) {
  StoreScale(out, FromBits(scale_bits));
  __builtin_memset(out + Format::kScaleBytes, 0, kBlock * Format::kBits / 8);
}

template <class Format>
constexpr int64_t BlockBytes(int64_t count) {
  return Format::kScaleBytes + (count * Format::kBits + 7) / 8;
}

template <class Format, bool kStochastic>
void EncodeShort(const float* x, int64_t count, Position position, uint8_t* out) {
  float padded[kBlock] = {};
  uint8_t bytes[kMaxBlockBytes];
  __builtin_memcpy(padded, x, count * sizeof(float));
  Format::template Encode<kStochastic>(padded, count, position, bytes);
  __builtin_memcpy(out, bytes, BlockBytes<Format>(count));
}

template <class Format, bool kStochastic>
void EncodeBlocks(const float* x, int64_t n, uint8_t* out, const Rounding& rounding) {
  Position position = {rounding.seed, static_cast<uint64_t>(rounding.first)};
  for (; n >= kBlock; n -= kBlock) {
    Format::template Encode<kStochastic>(x, kBlock, position, out);
    x += kBlock;
    out += BlockBytes<Format>(kBlock);
    position.first += kBlock;
  }
  if (n > 0) EncodeShort<Format, kStochastic>(x, n, position, out);
}

template <class Format>
void Encode(const float* x, int64_t n, uint8_t* out, const Rounding& rounding) {
  if (rounding.stochastic) {
    EncodeBlocks<Format, true>(x, n, out, rounding);
  } else {
    EncodeBlocks<Format, false>(x, n, out, rounding);
  }
}

// Ways to combine a decoded number with the base.
struct Keep {
  static float Apply(float, float value) { return value; }
};
struct Add {
  static float Apply(float base, float value) { return base + value; }
};
struct Subtract {
  static float Apply(float base, float value) { return base - value; }
};

template <class Combine>
void CombineBlock(const float* base, const float* __restrict value, float* y) {
  TFSCALE_INDEPENDENT
  for (int i = 0; i < kBlock; ++i) y[i] = Combine::Apply(base[i], value[i]);
}

template <class Format, class Combine>
void DecodeShort(const uint8_t* in, int64_t count, const float* base, float* y) {
  uint8_t padded[kMaxBlockBytes] = {};
  float value[kBlock];
  float sum[kBlock] = {};
  __builtin_memcpy(padded, in, BlockBytes<Format>(count));
  Format::Decode(padded, value);
  if (base != nullptr) __builtin_memcpy(sum, base, count * sizeof(float));
  CombineBlock<Combine>(sum, value, sum);
  __builtin_memcpy(y, sum, count * sizeof(float));
}

template <class Format>
void Decode(const uint8_t* in, int64_t n, const float*, float* y) {
  for (; n >= kBlock; n -= kBlock) {
    Format::Decode(in, y);
    in += BlockBytes<Format>(kBlock);
    y += kBlock;
  }
  if (n > 0) DecodeShort<Format, Keep>(in, n, nullptr, y);
}

template <class Format, class Combine>
void DecodeOnto(const uint8_t* in, int64_t n, const float* base, float* y) {
  float value[kBlock];
  for (; n >= kBlock; n -= kBlock) {
    Format::Decode(in, value);
    CombineBlock<Combine>(base, value, y);
    in += BlockBytes<Format>(kBlock);
    base += kBlock;
    y += kBlock;
  }
  if (n > 0) DecodeShort<Format, Combine>(in, n, base, y);
}

template <class Format>
constexpr Kernels KernelsOf() {
  return {Encode<Format>, Decode<Format>, DecodeOnto<Format, Add>, DecodeOnto<Format, Subtract>};
}

}  // namespace
}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_BLOCK_H_
