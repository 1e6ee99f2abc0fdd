// fp32: the numbers themselves, in the machine's byte order (little-endian).
//
// Bytes: n times the size of a number. Error: none; NaN and Inf are kept.
// Integers wrap around on overflow, as two's complement does.
#ifndef TFSCALE_WIRE_EXACT_H_
#define TFSCALE_WIRE_EXACT_H_

#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "custom_ops/wire/codec.h"
#include "custom_ops/wire/independent.h"

namespace tfscale {
namespace wire {

// Type of sums: unsigned for integers, since unsigned overflow is defined.
template <class T, bool = std::is_integral<T>::value>
struct Sum {
  using Type = T;
};
template <class T>
struct Sum<T, true> {
  using Type = typename std::make_unsigned<T>::type;
};

template <class T>
class ExactCodec final : public Codec {
 public:
  std::string_view name() const override { return FactsOf(Format::kFp32).name; }
  int64_t element_bytes() const override { return sizeof(T); }
  bool lossless() const override { return true; }
  int64_t Bytes(int64_t n) const override { return n * static_cast<int64_t>(sizeof(T)); }

  void Encode(const void* x, int64_t n, uint8_t* out, const Rounding&) const override {
    if (n > 0) std::memmove(out, x, Bytes(n));
  }

  void Decode(const uint8_t* in, int64_t n, void* y) const override {
    if (n > 0) std::memmove(y, in, Bytes(n));
  }

  void DecodeAdd(const uint8_t* in, int64_t n, const void* base, void* y) const override {
    const T* from = static_cast<const T*>(base);
    T* to = static_cast<T*>(y);
    TFSCALE_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      to[i] = static_cast<T>(static_cast<Wide>(from[i]) + Load(in, i));
    }
  }

  void DecodeSubtract(const uint8_t* in, int64_t n, const void* x, void* y) const override {
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    TFSCALE_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      to[i] = static_cast<T>(static_cast<Wide>(from[i]) - Load(in, i));
    }
  }

 private:
  using Wide = typename Sum<T>::Type;

  static Wide Load(const uint8_t* in, int64_t i) {
    Wide value;
    std::memcpy(&value, in + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
};

}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_EXACT_H_
