// Tests of custom_ops/wire: every codec, at every instruction set of this
// machine, against the bounds that the table of facts states.
//
//   g++ -std=c++17 -O1 -g -ffp-contract=off -fsanitize=address,undefined -I.
//       custom_ops/wire/*.cc tests/native/wire_test.cc -lgtest -lgtest_main
//       -pthread -o wire_test
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "custom_ops/wire/codec.h"
#include "custom_ops/wire/kernels.h"
#include "tests/native/formats.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tfscale {
namespace wire {
namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

constexpr Level kLevels[] = {Level::kBase, Level::kAvx2, Level::kAvx512};
constexpr int64_t kSizes[] = {0, 1, 2, 7, 255, 256, 257, 1000, 4096 + 3};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();

// ---------------------------------------------------------------- helpers

std::vector<Format> Unbiased() {
  std::vector<Format> formats;
  for (Format format : Lossy()) {
    if (RoundsAtRandom(format)) formats.push_back(format);
  }
  return formats;
}

const Codec* Float(Format format) { return Find(format, Element::kFloat32); }

std::vector<const Codec*> AtAllLevels(Format format) {
  std::vector<const Codec*> codecs;
  for (Level level : kLevels) {
    if (const Codec* codec = FindAt(level, format, Element::kFloat32)) codecs.push_back(codec);
  }
  return codecs;
}

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::vector<uint32_t> BitsOf(const Floats& values) {
  std::vector<uint32_t> bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

Rounding Stochastic(uint64_t seed, int64_t first = 0) {
  Rounding rounding;
  rounding.stochastic = true;
  rounding.seed = seed;
  rounding.first = first;
  return rounding;
}

Bytes Encode(const Codec& codec, const Floats& x, const Rounding& rounding = Rounding()) {
  Bytes bytes(codec.Bytes(x.size()));
  codec.Encode(x.data(), x.size(), bytes.data(), rounding);
  return bytes;
}

Floats Decode(const Codec& codec, const Bytes& bytes, int64_t n) {
  Floats y(n, -77.0f);
  codec.Decode(bytes.data(), n, y.data());
  return y;
}

Floats RoundTrip(const Codec& codec, const Floats& x, const Rounding& rounding = Rounding()) {
  return Decode(codec, Encode(codec, x, rounding), x.size());
}

Floats Normal(int64_t n, float scale = 1.0f, uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats x(n);
  for (float& value : x) value = scale * normal(generator);
  return x;
}

// Magnitudes from 2^-149 to 2^128, and zeros of both signs.
Floats Wild(int64_t n, uint32_t seed = 2) {
  std::mt19937 generator(seed);
  Floats x(n);
  for (float& value : x) {
    const uint32_t bits = generator();
    value = FloatOf(bits);
    if (!std::isfinite(value) || bits % 17 == 0) value = FloatOf(bits & 0x80000000u);
  }
  return x;
}

// Blocks that differ in magnitude from one another, not within themselves.
Floats Graded(int64_t n, uint32_t seed = 3) {
  Floats x = Normal(n, 1.0f, seed);
  for (int64_t i = 0; i < n; ++i) {
    const int exponent = static_cast<int>(i / kBlock * 37 % 270) - 148;
    x[i] = std::ldexp(std::min(std::max(x[i], -3.9f), 3.9f), std::min(exponent, 125));
  }
  return x;
}

// Values around every power of two that some code path treats specially.
Floats Extremes() {
  Floats x;
  for (int exponent = -149; exponent <= 127; ++exponent) {
    for (float factor : {1.0f, 1.25f, 1.5f, 1.75f, 1.9375f, 1.9999999f}) {
      x.push_back(std::ldexp(factor, exponent));
      x.push_back(-x.back());
    }
  }
  for (int i = 0; i < 64; ++i) x.push_back(FloatOf(0x7f7fffff - i));
  return x;
}

double BlockMax(const Floats& x, int64_t i) {
  const int64_t begin = i / kBlock * kBlock;
  const int64_t end = std::min<int64_t>(begin + kBlock, x.size());
  double largest = 0;
  for (int64_t j = begin; j < end; ++j) largest = std::max(largest, std::fabs(double{x[j]}));
  return largest;
}

double Bound(Format format, bool stochastic, double x, double amax) {
  const Error& error = stochastic ? FactsOf(format).stochastic : FactsOf(format).nearest;
  const double of_block = amax / error.of_block + amax / error.of_floats;
  return std::max({error.least, std::fabs(x) / error.of_number, of_block});
}

// `least`: what is lost of a number so small that the processor takes it for 0.
void ExpectWithinBound(Format format, bool stochastic, const Floats& x, const Floats& y,
                       double least = 0) {
  double amax = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (i % kBlock == 0) amax = BlockMax(x, i);
    ASSERT_TRUE(std::isfinite(y[i])) << "x[" << i << "] = " << x[i];
    ASSERT_LE(std::fabs(double{x[i]} - double{y[i]}),
              std::max(least, Bound(format, stochastic, x[i], amax)))
        << "x[" << i << "] = " << x[i] << ", decoded " << y[i] << ", block max " << amax;
  }
}

// ------------------------------------------------------- names and sizes

TEST(Names, ParseAndPrint) {
  for (const Facts& facts : kFacts) {
    Format format;
    ASSERT_TRUE(ParseFormat(facts.name, &format));
    EXPECT_EQ(format, facts.format);
    EXPECT_EQ(Float(format)->name(), facts.name);
    EXPECT_EQ(Float(format)->lossless(), format == Format::kFp32);
    EXPECT_EQ(Float(format)->element_bytes(), 4);
  }
  Format unused;
  for (const char* name : {"", "fp", "fp3", "fp320", "INT8", "int16"}) {
    EXPECT_FALSE(ParseFormat(name, &unused)) << name;
  }
}

TEST(Names, LowPrecisionIsForFloat32Only) {
  for (Format format : Lossy()) {
    for (Element element : {Element::kFloat64, Element::kInt32, Element::kInt64}) {
      EXPECT_EQ(Find(format, element), nullptr);
    }
  }
  EXPECT_EQ(Find(static_cast<Format>(99), Element::kFloat32), nullptr);
}

TEST(Names, SimdLevelIsAvailable) {
  EXPECT_TRUE(Available(ChosenLevel()));
  EXPECT_EQ(SimdLevel(), LevelName(ChosenLevel()));
}

TEST(Sizes, FollowTheFormulas) {
  for (int64_t n : kSizes) {
    const double blocks = std::ceil(static_cast<double>(n) / kBlock);
    for (const Facts& facts : kFacts) {
      const double payload = std::ceil(n * facts.bits / 8.0);
      EXPECT_EQ(Float(facts.format)->Bytes(n), payload + blocks * facts.scale_bytes) << facts.name;
    }
  }
}

// ------------------------------------------------------------- round trips

struct Case {
  Format format;
  bool stochastic;
};

class EveryCodec : public testing::TestWithParam<Case> {
 protected:
  Format format() const { return GetParam().format; }
  bool stochastic() const { return GetParam().stochastic; }
  Rounding rounding() const { return stochastic() ? Stochastic(42, 1000) : Rounding(); }
  void ExpectBound(const Floats& x) {
    for (const Codec* codec : AtAllLevels(format())) {
      ExpectWithinBound(format(), stochastic(), x, RoundTrip(*codec, x, rounding()));
    }
  }
};

std::vector<Case> AllCases() {
  std::vector<Case> cases = {{Format::kFp32, false}};
  for (Format format : Lossy()) {
    cases.push_back({format, false});
    cases.push_back({format, true});
  }
  return cases;
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  return std::string(Float(info.param.format)->name()) +
         (info.param.stochastic ? "Stochastic" : "Nearest");
}

INSTANTIATE_TEST_SUITE_P(Wire, EveryCodec, testing::ValuesIn(AllCases()), CaseName);

TEST_P(EveryCodec, StaysWithinItsBound) {
  for (int64_t n : kSizes) {
    ExpectBound(Normal(n));
    ExpectBound(Wild(n));
  }
  ExpectBound(Graded(300 * kBlock));
}

TEST_P(EveryCodec, StaysWithinItsBoundAtExtremes) {
  const Floats extremes = Extremes();
  for (float extreme : extremes) {
    Floats alone(kBlock, extreme);
    Floats mixed = Normal(100, std::fabs(extreme) / 8);
    for (float& value : mixed) value = std::min(std::max(value, -kMax), kMax);
    mixed[50] = extreme;
    ExpectBound(alone);
    ExpectBound(mixed);
  }
  ExpectBound(extremes);
  for (int64_t n = 1; n < kBlock; n += 2) ExpectBound(Floats(n, kMax));
}

TEST_P(EveryCodec, ZerosStayZeros) {
  for (float zero : {0.0f, -0.0f}) {
    for (float y : RoundTrip(*Float(format()), Floats(300, zero), rounding())) EXPECT_EQ(y, 0.0f);
  }
}

TEST_P(EveryCodec, WritesExactlyItsBytesAtAnyAlignment) {
  constexpr int kGuard = 80;
  for (const Codec* codec : AtAllLevels(format())) {
    for (int64_t n : kSizes) {
      const Floats x = Normal(n);
      const Bytes expected = Encode(*codec, x, rounding());
      for (int offset : {0, 1, 2, 3, 5, 17}) {
        Bytes guarded(kGuard + offset + expected.size() + kGuard, 0xab);
        uint8_t* out = guarded.data() + kGuard + offset;
        codec->Encode(x.data(), n, out, rounding());
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), out));
        std::fill_n(out, expected.size(), 0xab);
        ASSERT_EQ(std::count(guarded.begin(), guarded.end(), 0xab), guarded.size());
      }
    }
  }
}

TEST_P(EveryCodec, DecodesFromAnyAlignmentWithinItsNumbers) {
  constexpr int kGuard = 20;
  for (const Codec* codec : AtAllLevels(format())) {
    for (int64_t n : kSizes) {
      const Bytes bytes = Encode(*codec, Normal(n), rounding());
      const Floats expected = Decode(*codec, bytes, n);
      for (int offset : {1, 2, 3}) {
        Bytes shifted(offset + bytes.size());
        std::copy(bytes.begin(), bytes.end(), shifted.begin() + offset);
        Floats guarded(kGuard + n + kGuard, -77.0f);
        codec->Decode(shifted.data() + offset, n, guarded.data() + kGuard);
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), guarded.begin() + kGuard));
        ASSERT_EQ(std::count(guarded.begin(), guarded.begin() + kGuard, -77.0f), kGuard);
        ASSERT_EQ(std::count(guarded.end() - kGuard, guarded.end(), -77.0f), kGuard);
      }
    }
  }
}

TEST_P(EveryCodec, AddAndSubtractAgreeWithDecode) {
  for (const Codec* codec : AtAllLevels(format())) {
    for (int64_t n : kSizes) {
      const Floats base = Normal(n, 3.0f, 9);
      const Bytes bytes = Encode(*codec, Normal(n), rounding());
      const Floats decoded = Decode(*codec, bytes, n);
      Floats sum(n), rest(n), in_place = base, onto_zero(n, 0.0f);
      codec->DecodeAdd(bytes.data(), n, base.data(), sum.data());
      codec->DecodeSubtract(bytes.data(), n, base.data(), rest.data());
      codec->DecodeAdd(bytes.data(), n, onto_zero.data(), onto_zero.data());
      for (int64_t i = 0; i < n; ++i) {
        const volatile float plus = base[i] + decoded[i], minus = base[i] - decoded[i];
        ASSERT_EQ(BitsOf(sum[i]), BitsOf(plus));
        ASSERT_EQ(BitsOf(rest[i]), BitsOf(minus));
        ASSERT_EQ(onto_zero[i], decoded[i]);
      }
      codec->DecodeAdd(bytes.data(), n, in_place.data(), in_place.data());
      ASSERT_EQ(BitsOf(in_place), BitsOf(sum));
      in_place = base;
      codec->DecodeSubtract(bytes.data(), n, in_place.data(), in_place.data());
      ASSERT_EQ(BitsOf(in_place), BitsOf(rest));
    }
  }
}

TEST_P(EveryCodec, ChunksOfWholeBlocksJoin) {
  const Floats x = Normal(5 * kBlock + 77);
  const Codec& codec = *Float(format());
  const Bytes whole = Encode(codec, x, rounding());
  for (int64_t cut : {kBlock, 2 * kBlock, 5 * kBlock}) {
    Rounding later = rounding();
    later.first += cut;
    Bytes joined = Encode(codec, Floats(x.begin(), x.begin() + cut), rounding());
    const Bytes tail = Encode(codec, Floats(x.begin() + cut, x.end()), later);
    joined.insert(joined.end(), tail.begin(), tail.end());
    EXPECT_EQ(joined, whole);
  }
}

// ------------------------------------------- one result on every machine

TEST_P(EveryCodec, EveryInstructionSetGivesTheSameBits) {
  const std::vector<const Codec*> codecs = AtAllLevels(format());
  for (const Floats& x : {Normal(1000), Wild(4099), Graded(20000), Extremes()}) {
    const Bytes expected = Encode(*codecs[0], x, rounding());
    const Floats decoded = Decode(*codecs[0], expected, x.size());
    for (const Codec* codec : codecs) {
      ASSERT_EQ(Encode(*codec, x, rounding()), expected);
      ASSERT_EQ(BitsOf(Decode(*codec, expected, x.size())), BitsOf(decoded));
    }
  }
}

#if defined(__x86_64__)
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
};

TEST_P(EveryCodec, DecodesTheSameBitsWhenDenormalsAreFlushed) {
  for (const Codec* codec : AtAllLevels(format())) {
    for (const Floats& x : {Normal(1000), Wild(4099), Graded(90000), Extremes()}) {
      const Bytes bytes = Encode(*codec, x, rounding());
      const std::vector<uint32_t> expected = BitsOf(Decode(*codec, bytes, x.size()));
      Floats decoded(x.size());
      {
        FlushDenormals flush;
        codec->Decode(bytes.data(), x.size(), decoded.data());
      }
      ASSERT_EQ(BitsOf(decoded), expected);
    }
  }
}

TEST_P(EveryCodec, BytesMadeWhileFlushingDecodeTheSameEverywhere) {
  const Codec& codec = *Float(format());
  for (const Floats& x : {Wild(4099), Graded(90000), Extremes()}) {
    Bytes bytes;
    Floats decoded;
    {
      FlushDenormals flush;
      bytes = Encode(codec, x, rounding());
      decoded = Decode(codec, bytes, x.size());
    }
    ASSERT_EQ(BitsOf(Decode(codec, bytes, x.size())), BitsOf(decoded));
    ExpectWithinBound(format(), stochastic(), x, decoded, 0x1p-126);
  }
}
#endif

// ---------------------------------------------------------- NaN, Inf, junk

TEST_P(EveryCodec, NaNAndInfNeverBecomeQuietNumbers) {
  const float specials[] = {kInf,
                            -kInf,
                            std::numeric_limits<float>::quiet_NaN(),
                            FloatOf(0x7f800001),
                            FloatOf(0xff800001),
                            FloatOf(0xffffffff)};
  for (const Codec* codec : AtAllLevels(format())) {
    for (float special : specials) {
      for (int64_t position : {0, 1, 100, 255, 256, 300}) {
        Floats x = Normal(301);
        x[position] = special;
        const Floats y = RoundTrip(*codec, x, rounding());
        ASSERT_FALSE(std::isfinite(y[position]));
        const int64_t other_block = position < kBlock ? 290 : 10;
        ASSERT_TRUE(std::isfinite(y[other_block]));
      }
    }
  }
}

TEST_P(EveryCodec, AnyBytesDecode) {
  std::mt19937 generator(5);
  for (const Codec* codec : AtAllLevels(format())) {
    for (int64_t n : kSizes) {
      Bytes bytes(codec->Bytes(n));
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
      Floats y(n, 1.0f);
      codec->Decode(bytes.data(), n, y.data());
      codec->DecodeAdd(bytes.data(), n, y.data(), y.data());
      codec->DecodeSubtract(bytes.data(), n, y.data(), y.data());
    }
  }
}

TEST_P(EveryCodec, NothingHappensForNoNumbers) {
  const Codec& codec = *Float(format());
  codec.Encode(nullptr, 0, nullptr, rounding());
  codec.Decode(nullptr, 0, nullptr);
  codec.DecodeAdd(nullptr, 0, nullptr, nullptr);
  codec.DecodeSubtract(nullptr, 0, nullptr, nullptr);
  EXPECT_EQ(codec.Bytes(0), 0);
}

// --------------------------------------- conversions against a reference

// Values of an IEEE-like format, straight from its definition.
struct Reference {
  int mantissa_bits;
  int bias;

  double Value(int code) const {
    const int exponent = code >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }

  // By search: the nearest code, and of two equally near ones the even one.
  int Nearest(double x, int largest_code) const {
    int low = 0, high = largest_code;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (Value(middle) <= x ? low : high) = middle;
    }
    const double below = x - Value(low), above = Value(high) - x;
    if (below == above) return low % 2 == 0 ? low : high;
    return below < above ? low : high;
  }
};

constexpr Reference kHalf = {10, 15};
constexpr Reference kE4M3 = {3, 7};
constexpr Reference kBrain = {7, 127};

// Every code's value, every midpoint, and the floats next to each.
Floats Interesting(const Reference& reference, int largest_code) {
  Floats x;
  for (int code = 0; code < largest_code; ++code) {
    const double low = reference.Value(code), high = reference.Value(code + 1);
    for (float value : {static_cast<float>(low), static_cast<float>((low + high) / 2)}) {
      for (float y : {value, std::nextafter(value, 0.0f), std::nextafter(value, kInf)}) {
        if (y > reference.Value(largest_code)) continue;
        x.push_back(y);
        x.push_back(-y);
      }
    }
  }
  return x;
}

// Encodes x behind a first number that fixes each block's scale at 1.
void ExpectNearest(Format format, const Reference& reference, float anchor, int largest_code) {
  const Floats x = Interesting(reference, largest_code);
  for (const Codec* codec : AtAllLevels(format)) {
    for (size_t begin = 0; begin < x.size(); begin += kBlock - 1) {
      Floats block = {anchor};
      const size_t end = std::min(x.size(), begin + kBlock - 1);
      block.insert(block.end(), x.begin() + begin, x.begin() + end);
      const Floats y = RoundTrip(*codec, block);
      for (size_t i = 0; i < block.size(); ++i) {
        const int code = reference.Nearest(std::fabs(block[i]), largest_code);
        ASSERT_EQ(y[i], std::copysign(reference.Value(code), block[i])) << block[i];
        ASSERT_EQ(std::signbit(y[i]), std::signbit(block[i]));
      }
    }
  }
}

TEST(Bf16, RoundsToNearestEven) { ExpectNearest(Format::kBf16, kBrain, 1.0f, 0x7f7f); }
TEST(Fp16, RoundsToNearestEven) { ExpectNearest(Format::kFp16, kHalf, 16384.0f, 0x77ff); }
TEST(Fp8, RoundsToNearestEven) { ExpectNearest(Format::kFp8, kE4M3, 448.0f, 0x7e); }

// Decodes every code behind a scale of 1.
void ExpectValues(Format format, const Reference& reference, int code_bytes, int finite_codes) {
  for (const Codec* codec : AtAllLevels(format)) {
    for (int code = 0; code < finite_codes; ++code) {
      for (int sign : {0, 1}) {
        const uint32_t bits = static_cast<uint32_t>(code | sign << (8 * code_bytes - 1));
        Bytes bytes(codec->Bytes(1));
        const float one = 1.0f;
        std::memcpy(bytes.data(), &one, bytes.size() > 2 ? sizeof(one) : 0);
        std::memcpy(bytes.data() + bytes.size() - code_bytes, &bits, code_bytes);
        const float y = Decode(*codec, bytes, 1)[0];
        ASSERT_EQ(y, (sign ? -1 : 1) * reference.Value(code)) << code;
        ASSERT_EQ(std::signbit(y), sign == 1);
      }
    }
  }
}

TEST(Bf16, DecodesEveryCode) { ExpectValues(Format::kBf16, kBrain, 2, 0x7f80); }
TEST(Fp16, DecodesEveryCode) { ExpectValues(Format::kFp16, kHalf, 2, 0x7c00); }
TEST(Fp8, DecodesEveryCode) { ExpectValues(Format::kFp8, kE4M3, 1, 0x7f); }

TEST(Bf16, SaturatesSoThatFiniteStaysFinite) {
  for (bool stochastic : {false, true}) {
    const Rounding rounding = stochastic ? Stochastic(3) : Rounding();
    for (float y : RoundTrip(*Float(Format::kBf16), Floats(300, kMax), rounding)) {
      ASSERT_EQ(BitsOf(y), 0x7f7f0000u);
    }
  }
}

TEST(Bf16, KeepsEachNaNAndInf) {
  const Floats x = {1.0f, kInf, -kInf, FloatOf(0x7f800001), FloatOf(0xff80ffff), -2.0f};
  const Floats y = RoundTrip(*Float(Format::kBf16), x);
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_EQ(y[1], kInf);
  EXPECT_EQ(y[2], -kInf);
  EXPECT_TRUE(std::isnan(y[3]));
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_TRUE(std::signbit(y[4]));
  EXPECT_EQ(y[5], -2.0f);
}

TEST(Minifloat, EncodingAgainGivesTheSameBytes) {
  for (Format format : {Format::kFp16, Format::kFp8, Format::kBf16}) {
    const Codec& codec = *Float(format);
    for (const Floats& x : {Normal(1000), Wild(4099), Graded(90000), Extremes()}) {
      const Floats y = RoundTrip(codec, x);
      ASSERT_EQ(BitsOf(RoundTrip(codec, y)), BitsOf(y));
    }
  }
}

TEST(Fp8, UsesItsRange) {
  for (float amax : {1.0f, 1.75f, 1.76f, 3.3f, 1e-20f, 1e20f}) {
    const Bytes bytes = Encode(*Float(Format::kFp8), {amax, amax / 3});
    EXPECT_GE(bytes[4], 0x76) << amax;  // 224 or more
    EXPECT_LE(bytes[4], 0x7e) << amax;
  }
}

// --------------------------------------------------------- integer grids

TEST(Grid, KeepsMultiplesOfTheScale) {
  const std::pair<Format, int> grids[] = {
      {Format::kInt8, 127}, {Format::kInt4, 7}, {Format::kTernary, 1}};
  for (auto [format, levels] : grids) {
    Floats x;
    for (int q = -levels; q <= levels; ++q) x.push_back(q * 0.25f);
    for (const Codec* codec : AtAllLevels(format)) {
      EXPECT_EQ(RoundTrip(*codec, x), x);
      for (int seed = 0; seed < 200; ++seed) {
        ASSERT_EQ(RoundTrip(*codec, x, Stochastic(seed)), x);
      }
    }
  }
}

TEST(Ternary, SendsMinusOneZeroOneTimesTheLargest) {
  const Floats x = {4.0f, -4.0f, 1.9f, 2.1f, -1.9f, -2.1f, 2.0f, 0.0f};
  const Floats y = {4.0f, -4.0f, 0.0f, 4.0f, 0.0f, -4.0f, 0.0f, 0.0f};
  EXPECT_EQ(RoundTrip(*Float(Format::kTernary), x), y);
}

TEST(Sign, SendsTheMeanMagnitude) {
  const Floats x = {1.0f, -2.0f, 3.0f, -6.0f, 0.0f, -0.0f};
  const Floats y = {2.0f, -2.0f, 2.0f, -2.0f, 2.0f, -2.0f};
  EXPECT_EQ(RoundTrip(*Float(Format::kSign), x), y);
}

TEST(Sign, IsNeverWorseThanSendingNothing) {
  const Floats x = Normal(100 * kBlock);
  const Floats y = RoundTrip(*Float(Format::kSign), x);
  double error = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    error += std::pow(double{x[i]} - y[i], 2);
    norm += std::pow(double{x[i]}, 2);
  }
  EXPECT_NEAR(error / norm, 1 - 2 / std::acos(-1.0), 0.02);  // 1 - E|x|^2 / E x^2
}

// ----------------------------------------------------- stochastic rounding

// Mean error over seeds, in standard errors, for numbers of many sizes.
TEST(StochasticRounding, IsUnbiased) {
  constexpr int kSeeds = 20000;
  Floats x = Normal(64, 0.3f);
  x[0] = 1.0f;
  x[1] = 1e-3f;
  x[2] = -1e-4f;
  x[3] = 0.999f;
  for (Format format : Unbiased()) {
    const Codec& codec = *Float(format);
    std::vector<double> sum(x.size()), squares(x.size());
    for (int seed = 0; seed < kSeeds; ++seed) {
      const Floats y = RoundTrip(codec, x, Stochastic(seed));
      for (size_t i = 0; i < x.size(); ++i) {
        const double error = double{y[i]} - double{x[i]};
        sum[i] += error;
        squares[i] += error * error;
      }
    }
    for (size_t i = 0; i < x.size(); ++i) {
      const double mean = sum[i] / kSeeds;
      const double deviation = std::sqrt(squares[i] / kSeeds / kSeeds);
      ASSERT_LE(std::fabs(mean), 5 * deviation + 1e-6) << codec.name() << " x = " << x[i];
    }
  }
}

// The block's largest number sits at the edge of the codes: one draw in 65536
// would take it beyond, to the other sign.
TEST(StochasticRounding, NeverLeavesTheCodes) {
  for (float largest : Normal(48, 5.0f, 6)) {
    Floats x((int64_t{1} << 18), largest);
    for (size_t i = 0; i < x.size(); i += 2) x[i] = -largest;
    const Floats y = RoundTrip(*Float(Format::kInt8), x, Stochastic(13));
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_LE(std::fabs(x[i] - y[i]), std::fabs(largest) * (1.0f / 127 + 0x1p-20f));
    }
  }
}

// Across positions of one seed: an average over a long buffer.
TEST(StochasticRounding, IsUnbiasedAcrossPositions) {
  constexpr int64_t kCount = 1 << 20;
  Floats x(kCount, 0.3f);
  for (int64_t i = 0; i < kCount; i += kBlock) x[i] = 1.0f;
  for (Format format : Unbiased()) {
    const Floats y = RoundTrip(*Float(format), x, Stochastic(11));
    double sum = 0;
    for (int64_t i = 0; i < kCount; ++i) sum += double{y[i]} - double{x[i]};
    EXPECT_LE(std::fabs(sum / kCount), 5 * 0.5 / std::sqrt(kCount)) << Float(format)->name();
  }
}

TEST(StochasticRounding, NeighboursAndSeedsAreIndependent) {
  constexpr int64_t kCount = 1 << 18;
  Floats x(kCount, 0.5f);
  for (int64_t i = 0; i < kCount; i += kBlock) x[i] = 1.0f;
  const Codec& codec = *Float(Format::kTernary);
  const Floats a = RoundTrip(codec, x, Stochastic(1));
  const Floats b = RoundTrip(codec, x, Stochastic(2));
  for (int64_t lag : {1, 2, 4, 16, 255, 256, 4096}) {
    double same_seed = 0, other_seed = 0;
    for (int64_t i = 0; i + lag < kCount; ++i) {
      same_seed += (a[i] - 0.5) * (a[i + lag] - 0.5) * 4;
      other_seed += (a[i + lag] - 0.5) * (b[i] - 0.5) * 4;
    }
    const double first_numbers = static_cast<double>(kCount / kBlock);  // always 1
    EXPECT_LE(std::fabs(same_seed), 5 * std::sqrt(kCount) + first_numbers) << lag;
    EXPECT_LE(std::fabs(other_seed), 5 * std::sqrt(kCount) + first_numbers) << lag;
  }
}

TEST(StochasticRounding, IsReproducibleAndSeedsDiffer) {
  const Floats x = Normal(1000);
  for (Format format : Unbiased()) {
    const Codec& codec = *Float(format);
    EXPECT_EQ(Encode(codec, x, Stochastic(1)), Encode(codec, x, Stochastic(1)));
    EXPECT_NE(Encode(codec, x, Stochastic(1)), Encode(codec, x, Stochastic(2)));
    EXPECT_NE(Encode(codec, x, Stochastic(1)), Encode(codec, x, Stochastic(uint64_t{1} << 32)));
    EXPECT_NE(Encode(codec, x, Stochastic(1)), Encode(codec, x, Stochastic(1, 1)));
    EXPECT_NE(Encode(codec, x, Stochastic(1)), Encode(codec, x, Stochastic(1, int64_t{1} << 32)));
    EXPECT_NE(Encode(codec, x, Stochastic(1)), Encode(codec, x));
  }
}

// Draws depend on the position alone, also where its low 32 bits wrap around.
TEST(StochasticRounding, DoesNotDependOnCuts) {
  const int64_t starts[] = {0,
                            5,
                            (int64_t{1} << 32) - 300,
                            (int64_t{1} << 32) - 1,
                            -10,
                            std::numeric_limits<int64_t>::max() - 5000};
  const Floats x(1000, 0.3f);
  for (Format format : {Format::kInt8, Format::kBf16}) {
    for (const Codec* codec : AtAllLevels(format)) {
      for (int64_t start : starts) {
        const Floats whole = RoundTrip(*codec, x, Stochastic(9, start));
        for (int64_t cut : {1, 17, 256, 299, 300, 301, 700}) {
          const Floats head = RoundTrip(*codec, Floats(cut, 0.3f), Stochastic(9, start));
          const Floats tail =
              RoundTrip(*codec, Floats(1000 - cut, 0.3f), Stochastic(9, start + cut));
          Floats joined = head;
          joined.insert(joined.end(), tail.begin(), tail.end());
          ASSERT_EQ(joined, whole) << start << " " << cut;
        }
      }
    }
  }
}

// ------------------------------------------------------------- exact wires

template <class T>
struct ElementOf;
template <>
struct ElementOf<float> {
  static constexpr Element kValue = Element::kFloat32;
};
template <>
struct ElementOf<double> {
  static constexpr Element kValue = Element::kFloat64;
};
template <>
struct ElementOf<int32_t> {
  static constexpr Element kValue = Element::kInt32;
};
template <>
struct ElementOf<int64_t> {
  static constexpr Element kValue = Element::kInt64;
};

template <class T>
class Exact : public testing::Test {};
using ExactTypes = testing::Types<float, double, int32_t, int64_t>;
TYPED_TEST_SUITE(Exact, ExactTypes);

TYPED_TEST(Exact, CarriesTheNumbersThemselves) {
  const Codec* codec = Find(Format::kFp32, ElementOf<TypeParam>::kValue);
  ASSERT_NE(codec, nullptr);
  EXPECT_TRUE(codec->lossless());
  EXPECT_EQ(codec->name(), "fp32");
  EXPECT_EQ(codec->element_bytes(), static_cast<int64_t>(sizeof(TypeParam)));
  for (int64_t n : kSizes) {
    std::vector<TypeParam> x(n), y(n), sum(n), rest(n);
    for (int64_t i = 0; i < n; ++i) x[i] = static_cast<TypeParam>(i * 3 - 5);
    Bytes bytes(codec->Bytes(n) + 1);
    codec->Encode(x.data(), n, bytes.data() + 1, Rounding());
    EXPECT_TRUE(n == 0 || std::memcmp(bytes.data() + 1, x.data(), n * sizeof(TypeParam)) == 0);
    codec->Decode(bytes.data() + 1, n, y.data());
    codec->DecodeAdd(bytes.data() + 1, n, x.data(), sum.data());
    codec->DecodeSubtract(bytes.data() + 1, n, x.data(), rest.data());
    EXPECT_EQ(y, x);
    EXPECT_EQ(rest, std::vector<TypeParam>(n));
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(sum[i], x[i] + x[i]);
  }
}

TYPED_TEST(Exact, WrapsAround) {
  if (!std::is_integral<TypeParam>::value) return;
  const Codec* codec = Find(Format::kFp32, ElementOf<TypeParam>::kValue);
  const TypeParam largest = std::numeric_limits<TypeParam>::max();
  const TypeParam smallest = std::numeric_limits<TypeParam>::min();
  const std::vector<TypeParam> x(40, largest), ones(40, 1);
  std::vector<TypeParam> y(40);
  Bytes bytes(codec->Bytes(40));
  codec->Encode(ones.data(), 40, bytes.data(), Rounding());
  codec->DecodeAdd(bytes.data(), 40, x.data(), y.data());
  EXPECT_EQ(y, std::vector<TypeParam>(40, smallest));
  codec->DecodeSubtract(bytes.data(), 40, y.data(), y.data());
  EXPECT_EQ(y, x);
}

}  // namespace
}  // namespace wire
}  // namespace tfscale
