// The little arithmetic that the engine does itself, in loops that compilers
// turn into vector code.
#ifndef TFSCALE_ENGINE_NUMBERS_H_
#define TFSCALE_ENGINE_NUMBERS_H_

#include <cstdint>
#include <cstring>

namespace tfscale {

template <typename T>
void Add(const T* a, const float* b, int64_t n, T* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
}

inline void Scale(float* x, int64_t n, float by) {
  for (int64_t i = 0; i < n; ++i) x[i] *= by;
}

template <typename T>
void Divide(const T* x, int64_t n, T by, T* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] / by;
}

// Looks at the exponents, so that no compiler flag can make it lie.
template <typename Bits, Bits kExponent, typename T>
bool AllFiniteBits(const T* x, int64_t n) {
  Bits worst = 0;
  for (int64_t i = 0; i < n; ++i) {
    Bits bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= kExponent;
    worst = bits > worst ? bits : worst;
  }
  return worst != kExponent;
}

inline bool AllFinite(const float* x, int64_t n) {
  return AllFiniteBits<uint32_t, 0x7f800000u>(x, n);
}

inline bool AllFinite(const double* x, int64_t n) {
  return AllFiniteBits<uint64_t, 0x7ff0000000000000u>(x, n);
}

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_NUMBERS_H_
