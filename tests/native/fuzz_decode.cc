// Fuzzes the codecs with bytes as an untrusted peer could send them.
//
//   clang++ -std=c++17 -O1 -g -ffp-contract=off -fsanitize=fuzzer,address,undefined
//       -fno-sanitize-recover=all -I. custom_ops/wire/*.cc
//       tests/native/fuzz_decode.cc -o fuzz_decode
//   ./fuzz_decode -max_total_time=60 -max_len=4096
//
// The first byte picks a format, the second trims the count; the rest is first
// decoded as it is, then read as numbers, which are encoded and decoded again.
// Besides not crashing:
//   - every instruction set decodes to the same numbers (all NaN count as one,
//     since which of two NaN survives an operation is not specified);
//   - every instruction set encodes numbers to the same bytes;
//   - finite numbers arrive finite, NaN and Inf do not arrive as quiet numbers.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "custom_ops/wire/codec.h"
#include "custom_ops/wire/kernels.h"

namespace {

using tfscale::wire::Available;
using tfscale::wire::Codec;
using tfscale::wire::Element;
using tfscale::wire::FindAt;
using tfscale::wire::Format;
using tfscale::wire::kFormats;
using tfscale::wire::Level;
using tfscale::wire::Rounding;

constexpr Level kLevels[] = {Level::kBase, Level::kAvx2, Level::kAvx512};

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

void Require(bool condition) {
  if (!condition) std::abort();
}

bool SameNumbers(const Floats& a, const Floats& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const bool both_nan = std::isnan(a[i]) && std::isnan(b[i]);
    if (!both_nan && std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return false;
  }
  return true;
}

// The largest count whose bytes fit.
int64_t CountFor(const Codec& codec, int64_t size) {
  int64_t low = 0, high = 8 * size + 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (codec.Bytes(middle) <= size ? low : high) = middle;
  }
  return low;
}

Floats DecodeOnce(const Codec& codec, const Bytes& bytes, int64_t n) {
  Floats y(n);
  codec.Decode(bytes.data(), n, y.data());
  return y;
}

void DecodeAsItIs(Format format, const Bytes& payload, uint8_t trim) {
  const Codec& base = *FindAt(Level::kBase, format, Element::kFloat32);
  int64_t n = CountFor(base, payload.size());
  n -= n > trim ? trim : 0;
  const Bytes bytes(payload.begin(), payload.begin() + base.Bytes(n));  // a tight fit for ASan
  const Floats expected = DecodeOnce(base, bytes, n);
  for (Level level : kLevels) {
    if (!Available(level)) continue;
    const Codec& codec = *FindAt(level, format, Element::kFloat32);
    Require(SameNumbers(DecodeOnce(codec, bytes, n), expected));
    Floats y(n, 1.0f);
    codec.DecodeAdd(bytes.data(), n, y.data(), y.data());
    codec.DecodeSubtract(bytes.data(), n, y.data(), y.data());
  }
}

Bytes EncodeOnce(const Codec& codec, const Floats& x, const Rounding& rounding) {
  Bytes bytes(codec.Bytes(x.size()));
  codec.Encode(x.data(), x.size(), bytes.data(), rounding);
  return bytes;
}

void CheckArrival(const Floats& x, const Floats& y) {
  bool all_finite = true;
  for (float value : x) all_finite = all_finite && std::isfinite(value);
  for (size_t i = 0; i < x.size(); ++i) {
    Require(std::isfinite(x[i]) || !std::isfinite(y[i]));
    Require(!all_finite || std::isfinite(y[i]));
  }
}

void EncodeAndDecode(Format format, const Bytes& payload, const Rounding& rounding) {
  Floats x(payload.size() / sizeof(float));
  if (!x.empty()) std::memcpy(x.data(), payload.data(), x.size() * sizeof(float));
  const Codec& base = *FindAt(Level::kBase, format, Element::kFloat32);
  const Bytes expected = EncodeOnce(base, x, rounding);
  for (Level level : kLevels) {
    if (!Available(level)) continue;
    Require(EncodeOnce(*FindAt(level, format, Element::kFloat32), x, rounding) == expected);
  }
  CheckArrival(x, DecodeOnce(base, expected, x.size()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const Format format = static_cast<Format>(data[0] % kFormats);
  const Bytes payload(data + 2, data + size);
  Rounding rounding;
  rounding.stochastic = data[0] >= 128;
  rounding.seed = data[1];
  DecodeAsItIs(format, payload, data[1]);
  EncodeAndDecode(format, payload, rounding);
  return 0;
}
