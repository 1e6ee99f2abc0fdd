// All block formats, for the instruction set of the file that includes this one.
#ifndef TFSCALE_WIRE_FORMATS_H_
#define TFSCALE_WIRE_FORMATS_H_

#include "custom_ops/wire/bfloat16.h"
#include "custom_ops/wire/block.h"
#include "custom_ops/wire/grid.h"
#include "custom_ops/wire/kernels.h"
#include "custom_ops/wire/minifloat.h"
#include "custom_ops/wire/sign.h"

namespace tfscale {
namespace wire {
namespace {

constexpr Kernels kBfloat16 = KernelsOf<Bfloat16>();
constexpr Kernels kFp16 = KernelsOf<Minifloat<Binary16>>();
constexpr Kernels kFp8 = KernelsOf<Minifloat<E4M3>>();
constexpr Kernels kInt8 = KernelsOf<Grid<Format::kInt8>>();
constexpr Kernels kInt4 = KernelsOf<Grid<Format::kInt4>>();
constexpr Kernels kTernary = KernelsOf<Grid<Format::kTernary>>();
constexpr Kernels kSign = KernelsOf<Sign>();

inline const Kernels* KernelsFor(Format format) {
  switch (format) {
    case Format::kFp32:
      return nullptr;
    case Format::kBf16:
      return &kBfloat16;
    case Format::kFp16:
      return &kFp16;
    case Format::kFp8:
      return &kFp8;
    case Format::kInt8:
      return &kInt8;
    case Format::kInt4:
      return &kInt4;
    case Format::kTernary:
      return &kTernary;
    case Format::kSign:
      return &kSign;
  }
  return nullptr;
}

}  // namespace
}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_FORMATS_H_
