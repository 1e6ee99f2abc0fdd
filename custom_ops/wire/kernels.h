// Block formats as tables of functions, one table for each instruction set.
//
// kernels_base.cc, kernels_avx2.cc and kernels_avx512.cc compile the same
// formats (formats.h) for different instruction sets. All tables give the same
// bytes and the same numbers, bit for bit.
#ifndef TFSCALE_WIRE_KERNELS_H_
#define TFSCALE_WIRE_KERNELS_H_

#include <cstdint>

#include "custom_ops/wire/codec.h"

namespace tfscale {
namespace wire {

struct Kernels {
  using EncodeFunction = void (*)(const float* x, int64_t n, uint8_t* out, const Rounding&);
  using DecodeFunction = void (*)(const uint8_t* in, int64_t n, const float* base, float* y);

  EncodeFunction encode;
  DecodeFunction decode;  // does not read base
  DecodeFunction decode_add;
  DecodeFunction decode_subtract;
};

enum class Level { kBase, kAvx2, kAvx512 };

// Each function returns nullptr for kFp32, and if its instruction set is not compiled
// in. Call Avx2Kernels and Avx512Kernels only on a processor that can run them.
const Kernels* BaseKernels(Format format);
const Kernels* Avx2Kernels(Format format);
const Kernels* Avx512Kernels(Format format);

// True if this binary and this processor have the level.
bool Available(Level level);

std::string_view LevelName(Level level);

// The best available level, or the lower one that TFSCALE_SIMD names.
Level ChosenLevel();

// Find() for a given level; nullptr if it is not available. For tests.
const Codec* FindAt(Level level, Format format, Element element);

}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_KERNELS_H_
