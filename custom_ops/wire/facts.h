// Facts about each wire: the only table in C++. tfscale/collectives/wires.py has the table in
// Python, and tests/test_wires.py compares the two.
#ifndef TFSCALE_WIRE_FACTS_H_
#define TFSCALE_WIRE_FACTS_H_

#include <cstdint>
#include <limits>
#include <string_view>

namespace tfscale {
namespace wire {

// Block-scaled formats share one scale among this many consecutive numbers.
// Chunks that are cut at multiples of it can be encoded one by one and their
// bytes joined.
inline constexpr int64_t kBlock = 256;

enum class Format : uint8_t { kFp32, kBf16, kFp16, kFp8, kInt8, kInt4, kTernary, kSign };

inline constexpr double kNone = std::numeric_limits<double>::infinity();

// A number x of a block whose largest is A is decoded with an error of at most
// max(least, |x| / of_number, A / of_block + A / of_floats).
struct Error {
  double least = 0;
  double of_number = kNone;
  double of_block = kNone;
  double of_floats = kNone;  // error of float rounding in encoding and decoding
};

struct Facts {
  Format format;
  std::string_view name;  // name that users pass
  int bits;               // bits of payload for each number
  int scale_bytes;        // bytes in front of each block's payload
  Error nearest;
  Error stochastic = nearest;  // formats with the same error ignore the request
};

// The headers of the formats prove these errors.
inline constexpr Facts kFacts[] = {
    {Format::kFp32, "fp32", 32, 0, {}},
    {Format::kBf16, "bf16", 16, 0, {0x1p-134, 0x1p8}, {0x1p-133, 0x1p7}},
    {Format::kFp16, "fp16", 16, 4, {0x1p-127, 0x1p11, 0x1p39}},
    {Format::kFp8, "fp8", 8, 4, {0x1p-127, 0x1p4, 229376}},
    {Format::kInt8, "int8", 8, 4, {0x1p-118, kNone, 254, 0x1p21}, {0x1p-118, kNone, 127, 0x1p21}},
    {Format::kInt4, "int4", 4, 4, {0x1p-118, kNone, 14, 0x1p21}, {0x1p-118, kNone, 7, 0x1p21}},
    {Format::kTernary, "ternary", 2, 4, {0x1p-118, kNone, 2, 0x1p21}, {0x1p-118, kNone, 1, 0x1p21}},
    {Format::kSign, "sign", 1, 4, {0x1p-126, kNone, 1}},
};
inline constexpr int kFormats = sizeof(kFacts) / sizeof(kFacts[0]);

constexpr const Facts& FactsOf(Format format) { return kFacts[static_cast<int>(format)]; }

constexpr bool RowsAreInOrder() {
  for (int i = 0; i < kFormats; ++i) {
    if (static_cast<int>(kFacts[i].format) != i) return false;
  }
  return true;
}
static_assert(RowsAreInOrder(), "a format is the number of its row");

}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_WIRE_FACTS_H_
