// Codec of a wire format: it encodes numbers that travel between two ranks.
//
// This folder knows nothing about TensorFlow, ranks or schedules. A codec
// is stateless and thread-safe; find one with Find() and keep the pointer.
#ifndef TFSCALE_WIRE_CODEC_H_
#define TFSCALE_WIRE_CODEC_H_

#include <cstdint>
#include <string_view>

#include "custom_ops/wire/facts.h"

namespace tfscale {
namespace wire {

// Type of the summed numbers. Half-precision inputs are widened to kFloat32 before
// they reach a codec. kByte: part of a number that is sent, and not summed.
enum class Element : uint8_t { kFloat32, kFloat64, kInt32, kInt64, kByte };

// Rounding of numbers between two codes: to the nearest code, or at random with the
// number itself as expectation. A random draw depends only on `seed` and on the number's
// position (`first` is the position of the first number). So it is the same on every
// machine and for every way to cut a buffer.
struct Rounding {
  bool stochastic = false;
  uint64_t seed = 0;
  int64_t first = 0;
};

// Pointers to numbers are aligned to the element; pointers to bytes need no
// alignment. Any n >= 0 is valid. Bytes from a peer are never trusted: any
// content of the right length decodes without undefined behaviour.
class Codec {
 public:
  virtual ~Codec() = default;

  // The name that users pass: "fp32", "int8", ...
  virtual std::string_view name() const = 0;

  // Bytes of one number in memory.
  virtual int64_t element_bytes() const = 0;

  // True if decode(encode(x)) == x bit for bit; then the bytes are the numbers
  // themselves and a sender may pass memory on without encoding it.
  virtual bool lossless() const = 0;

  // Exact bytes of n encoded numbers.
  virtual int64_t Bytes(int64_t n) const = 0;

  virtual void Encode(const void* x, int64_t n, uint8_t* out, const Rounding& rounding) const = 0;

  // y = decode(in)
  virtual void Decode(const uint8_t* in, int64_t n, void* y) const = 0;

  // y = base + decode(in); base may be y.
  virtual void DecodeAdd(const uint8_t* in, int64_t n, const void* base, void* y) const = 0;

  // y = x - decode(in), what encoding lost; x may be y.
  virtual void DecodeSubtract(const uint8_t* in, int64_t n, const void* x, void* y) const = 0;
};

// Returns the codec for a format over an element type; nullptr if there is none
// (low-precision formats exist for kFloat32 only).
const Codec* Find(Format format, Element element);

// Parses "fp32", "bf16", ...; false if the name is unknown.
bool ParseFormat(std::string_view name, Format* format);

// The instruction set chosen at run time: "sse2", "avx2", "avx512", "neon" or
// "portable". TFSCALE_SIMD, such as TFSCALE_SIMD=avx2, lowers the choice, for tests.
std::string_view SimdLevel();

}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_CODEC_H_
