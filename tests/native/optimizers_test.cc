// Tests of custom_ops/optimizers: types, rules, instruction sets and threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "custom_ops/optimizers/numbers.h"
#include "custom_ops/optimizers/update.h"

namespace tfscale {
namespace optimizers {
namespace {

using wire::Level;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr Type kTypes[] = {Type::kFloat32, Type::kBfloat16, Type::kFloat16};
constexpr int64_t kSizes[] = {0, 1, 7, 15, 16, 17, 511, 513, 1000, kBlock, kBlock + 1};
constexpr int64_t kManyBlocks = 4 * kBlock + 333;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<Level> Levels() {
  std::vector<Level> levels;
  for (Level level : {Level::kBase, Level::kAvx2, Level::kAvx512}) {
    if (wire::Available(level)) levels.push_back(level);
  }
  return levels;
}

// ------------------------------------------------------------------ numbers

double HalfValue(uint16_t code) {
  const int exponent = code >> 10 & 31;
  const int mantissa = code & 1023;
  const double sign = code & 0x8000 ? -1 : 1;
  if (exponent == 31) return mantissa ? kNaN : sign * kInf;
  return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

bool SameOrBothNaN(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || wire::Bits(a) == wire::Bits(b);
}

TEST(Float16, WidensAndNarrowsEveryCode) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float value = static_cast<float>(HalfValue(code));
    ASSERT_TRUE(SameOrBothNaN(Float16::Widen(code), value)) << code;
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(HalfValue(Float16::Narrow(value)))) << code;
    } else {
      ASSERT_EQ(Float16::Narrow(value), code);
    }
  }
}

// Between each code and the next: nearer to the one, in the middle, nearer to the other.
TEST(Float16, RoundsToNearestEven) {
  for (uint32_t code = 0; code < 0x7c00; ++code) {
    const float low = HalfValue(code);
    const float high = code == 0x7bff ? 65536.0f : HalfValue(code + 1);
    const float middle = low + (high - low) / 2;
    ASSERT_EQ(Float16::Narrow(middle), code + (code & 1));
    ASSERT_EQ(Float16::Narrow(std::nextafter(middle, 0.0f)), code);
    ASSERT_EQ(Float16::Narrow(std::nextafter(middle, kInf)), code + 1);
    ASSERT_EQ(Float16::Narrow(-middle), 0x8000 | (code + (code & 1)));
  }
  for (float large : {65536.0f, 1e6f, 3e38f, kInf}) {
    EXPECT_EQ(Float16::Narrow(large), 0x7c00);
    EXPECT_EQ(Float16::Narrow(-large), 0xfc00);
  }
  for (float small : {0.0f, 1e-40f, 1e-10f}) EXPECT_EQ(Float16::Narrow(-small), 0x8000);
}

TEST(Bfloat16, RoundsToNearestEven) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float value = wire::FromBits(code << 16);
    ASSERT_TRUE(SameOrBothNaN(Bfloat16::Widen(code), value));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(Bfloat16::Widen(Bfloat16::Narrow(value))));
      continue;
    }
    ASSERT_EQ(Bfloat16::Narrow(value), code);
    if (std::isinf(value)) continue;
    ASSERT_EQ(Bfloat16::Narrow(wire::FromBits(code << 16 | 0x7fff)), code);
    ASSERT_EQ(Bfloat16::Narrow(wire::FromBits(code << 16 | 0x8000)), code + (code & 1));
    ASSERT_EQ(Bfloat16::Narrow(wire::FromBits(code << 16 | 0x8001)), code + 1);
  }
}

// Signalling ones, and those whose payload is in the bits that are cut off.
TEST(Halves, KeepEveryNaN) {
  for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(Bfloat16::Widen(Bfloat16::Narrow(wire::FromBits(bits)))));
    EXPECT_TRUE(std::isnan(Float16::Widen(Float16::Narrow(wire::FromBits(bits)))));
  }
}

// ----------------------------------------------------------------- problems

float Widen(Type type, const void* x, int64_t i) {
  if (type == Type::kFloat32) return static_cast<const float*>(x)[i];
  const uint16_t code = static_cast<const uint16_t*>(x)[i];
  return type == Type::kBfloat16 ? Bfloat16::Widen(code) : Float16::Widen(code);
}

void Store(Type type, float value, void* x, int64_t i) {
  if (type == Type::kFloat32) {
    static_cast<float*>(x)[i] = value;
  } else {
    static_cast<uint16_t*>(x)[i] =
        type == Type::kBfloat16 ? Bfloat16::Narrow(value) : Float16::Narrow(value);
  }
}

// Memory is as long as the numbers, so that sanitizers see each step beyond.
// `skew` numbers come before them, so that they are not aligned.
struct Problem {
  Problem(Type type, int64_t n, uint32_t seed = 1, int64_t skew = 1)
      : type(type), n(n), skew(skew), w(Bytes()), g(Bytes()), m(n + skew), v(n + skew) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < n; ++i) {
      SetW(i, 0.3f * normal(generator));
      SetG(i, 0.1f * normal(generator));
      m[skew + i] = 0.1f * normal(generator);
      v[skew + i] = std::fabs(0.01f * normal(generator));
    }
  }

  int64_t Width() const { return type == Type::kFloat32 ? 4 : 2; }
  int64_t Bytes() const { return (n + skew) * Width(); }
  void SetW(int64_t i, float value) { Store(type, value, w.data(), skew + i); }
  void SetG(int64_t i, float value) { Store(type, value, g.data(), skew + i); }
  float W(int64_t i) const { return Widen(type, w.data(), skew + i); }
  float G(int64_t i) const { return Widen(type, g.data(), skew + i); }

  Arrays All() {
    return {w.data() + skew * Width(), g.data() + skew * Width(), m.data() + skew, v.data() + skew,
            n};
  }

  bool operator==(const Problem& other) const {
    return w == other.w && g == other.g && Same(m, other.m) && Same(v, other.v);
  }

  static bool Same(const Floats& a, const Floats& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](float x, float y) { return wire::Bits(x) == wire::Bits(y); });
  }

  Type type;
  int64_t n, skew;
  std::vector<uint8_t> w, g;
  Floats m, v;
};

void Inline(int64_t blocks, const Work& work) { work(0, blocks); }

// Each thread takes every so-many-th block.
Runner OnThreads(int threads) {
  return [threads](int64_t blocks, const Work& work) {
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t) {
      running.emplace_back([=, &work] {
        for (int64_t i = blocks - 1 - t; i >= 0; i -= threads) work(i, i + 1);
      });
    }
    for (auto& thread : running) thread.join();
  };
}

constexpr LambNumbers kLamb = {0.01f, 0.9f,  0.1f, 0.99f, 0.01f, 2.0f,
                               3.0f,  1e-6f, 0.1f, 0.0f,  kInf};
constexpr LarsNumbers kLars = {0.5f, 0.9f, 0.01f, 1e-9f, 0.1f};

std::vector<LarsSwitches> AllSwitches() {
  std::vector<LarsSwitches> all;
  for (int bits = 0; bits < 16; ++bits) {
    all.push_back({(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0});
  }
  return all;
}

// ---------------------------------------------------------------- reference

double Norm(const Doubles& x) {
  double sum = 0;
  for (double value : x) sum += value * value;
  return std::sqrt(sum);
}

struct Reference {
  explicit Reference(const Problem& p) {
    for (int64_t i = 0; i < p.n; ++i) {
      w.push_back(p.W(i));
      g.push_back(p.G(i));
      m.push_back(p.m[p.skew + i]);
      v.push_back(p.v[p.skew + i]);
    }
  }

  void Lamb(const LambNumbers& r, bool adapt) {
    Doubles u(w.size());
    for (size_t i = 0; i < w.size(); ++i) {
      m[i] = double{r.beta_1} * m[i] + double{r.rest_1} * g[i];
      v[i] = double{r.beta_2} * v[i] + double{r.rest_2} * g[i] * g[i];
      u[i] =
          double{r.correction_1} * m[i] / (std::sqrt(double{r.correction_2} * v[i]) + r.epsilon) +
          double{r.weight_decay} * w[i];
    }
    double ratio = 1;
    if (adapt && Norm(w) > 0 && Norm(u) > 0) {
      ratio = std::fmin(std::fmax(Norm(w), r.lower), r.upper) / Norm(u);
    }
    for (size_t i = 0; i < w.size(); ++i) w[i] -= double{r.learning_rate} * ratio * u[i];
  }

  void Lars(const LarsNumbers& r, const LarsSwitches& s) {
    const double rate = r.learning_rate;
    double ratio = 1;
    if (s.adapt && Norm(w) > 0 && Norm(g) > 0) {
      ratio = r.trust * Norm(w) / (Norm(g) + r.weight_decay * Norm(w) + r.epsilon);
    }
    if (s.clip) ratio = std::fmin(ratio / rate, 1);
    for (size_t i = 0; i < w.size(); ++i) {
      const double d = (s.rate_inside ? rate : 1) * ratio * (g[i] + double{r.weight_decay} * w[i]);
      m[i] = double{r.momentum} * m[i] + d;
      const double moved = s.nesterov ? double{r.momentum} * m[i] + d : m[i];
      w[i] -= (s.rate_inside ? 1 : rate) * moved;
    }
  }

  Doubles w, g, m, v;
};

// A few float32 roundings of numbers around 1, and one to the type of the result.
void ExpectNear(const Problem& p, const Reference& reference) {
  const double half_step = p.type == Type::kFloat32    ? 0
                           : p.type == Type::kBfloat16 ? 0x1p-8
                                                       : 0x1p-11;
  for (int64_t i = 0; i < p.n; ++i) {
    const double w = std::fabs(reference.w[i]);
    ASSERT_NEAR(p.m[p.skew + i], reference.m[i], 1e-6 * (1 + std::fabs(reference.m[i]))) << i;
    ASSERT_NEAR(p.v[p.skew + i], reference.v[i], 1e-6 * (1 + std::fabs(reference.v[i]))) << i;
    ASSERT_NEAR(p.W(i), reference.w[i], 1e-6 * (1 + w) + half_step * w) << i;
  }
}

TEST(Lamb, IsTheRule) {
  LambNumbers bounded = kLamb;
  bounded.lower = 0.5f;
  bounded.upper = 2.0f;
  for (Type type : kTypes) {
    for (int64_t n : kSizes) {
      const Problem start(type, n);
      for (bool adapt : {false, true}) {
        for (const LambNumbers& rule : {kLamb, bounded}) {
          Problem p = start;
          Reference reference(p);
          Lamb(rule, adapt, type, p.All(), Inline);
          reference.Lamb(rule, adapt);
          ExpectNear(p, reference);
        }
      }
    }
  }
}

TEST(Lars, IsTheRule) {
  for (Type type : kTypes) {
    for (int64_t n : kSizes) {
      const Problem start(type, n);
      for (const LarsSwitches& switches : AllSwitches()) {
        Problem p = start;
        Reference reference(p);
        Lars(kLars, switches, type, p.All(), Inline);
        reference.Lars(kLars, switches);
        ExpectNear(p, reference);
        ASSERT_EQ(p.v, start.v);
      }
    }
  }
}

// ------------------------------------------------------------ the same bits

TEST(Bits, DoNotDependOnTheInstructionSet) {
  for (Type type : kTypes) {
    for (int64_t n : kSizes) {
      Problem start(type, n, 3, n % 5);
      for (Level level : Levels()) {
        Problem base = start, fast = start;
        Lamb(kLamb, true, type, base.All(), Inline, Level::kBase);
        Lamb(kLamb, true, type, fast.All(), Inline, level);
        ASSERT_EQ(base, fast) << "LAMB, " << wire::LevelName(level) << ", " << n;
        for (const LarsSwitches& switches : AllSwitches()) {
          Lars(kLars, switches, type, base.All(), Inline, Level::kBase);
          Lars(kLars, switches, type, fast.All(), Inline, level);
          ASSERT_EQ(base, fast) << "LARS, " << wire::LevelName(level) << ", " << n;
        }
      }
    }
  }
}

TEST(Bits, DoNotDependOnThreads) {
  for (Type type : kTypes) {
    const Problem start(type, kManyBlocks);
    Problem alone = start;
    Lamb(kLamb, true, type, alone.All(), Inline);
    Lars(kLars, {true, true, true, false}, type, alone.All(), Inline);
    for (int threads : {1, 2, 3, 8}) {
      Problem p = start;
      Lamb(kLamb, true, type, p.All(), OnThreads(threads));
      Lars(kLars, {true, true, true, false}, type, p.All(), OnThreads(threads));
      ASSERT_EQ(p, alone) << threads << " threads";
    }
  }
}

// ------------------------------------------------------------------- edges

TEST(Ratio, IsOneWhereANormIsZero) {
  Problem still(Type::kFloat32, 100), adapted = still;
  for (int64_t i = 0; i < 100; ++i) {
    still.SetW(i, 0);
    adapted.SetW(i, 0);
  }
  Lamb(kLamb, false, Type::kFloat32, still.All(), Inline);
  Lamb(kLamb, true, Type::kFloat32, adapted.All(), Inline);
  EXPECT_EQ(still, adapted);
  for (bool zero_weights : {false, true}) {
    Problem plain(Type::kFloat32, 100), ratio = plain;
    for (int64_t i = 0; i < 100; ++i) {
      zero_weights ? plain.SetW(i, 0) : plain.SetG(i, 0);
      zero_weights ? ratio.SetW(i, 0) : ratio.SetG(i, 0);
    }
    Lars(kLars, {false, false, true, false}, Type::kFloat32, plain.All(), Inline);
    Lars(kLars, {true, false, true, false}, Type::kFloat32, ratio.All(), Inline);
    EXPECT_EQ(plain, ratio);
  }
}

// Squares of these would overflow or vanish in float32.
TEST(Ratio, HoldsForNumbersOfAnySize) {
  for (float size : {1e-30f, 1e30f}) {
    Problem p(Type::kFloat32, 1000);
    for (int64_t i = 0; i < p.n; ++i) {
      p.SetG(i, p.G(i) * size);
      p.m[p.skew + i] = 0;
    }
    Reference reference(p);
    Lars(kLars, {true, false, true, false}, p.type, p.All(), Inline);
    reference.Lars(kLars, {true, false, true, false});
    ExpectNear(p, reference);
    EXPECT_NE(p.m[p.skew], 0);
  }
}

TEST(Clip, HoldsForALearningRateOfZero) {
  LarsNumbers rule = kLars;
  rule.learning_rate = 0;
  Problem p(Type::kFloat32, 100), start = p;
  Lars(rule, {true, false, false, true}, p.type, p.All(), Inline);
  for (int64_t i = 0; i < p.n; ++i) {
    EXPECT_EQ(p.W(i), start.W(i));
    EXPECT_TRUE(std::isfinite(p.m[p.skew + i]));
  }
}

TEST(NotFinite, StaysWhereItIsIfTheRatioDoesNotSpreadIt) {
  for (Type type : kTypes) {
    for (bool lamb : {false, true}) {
      Problem p(type, 100);
      p.SetG(40, kNaN);
      lamb ? Lamb(kLamb, true, type, p.All(), Inline)
           : Lars(kLars, {true, false, true, false}, type, p.All(), Inline);
      for (int64_t i = 0; i < p.n; ++i) {
        EXPECT_EQ(std::isnan(p.W(i)), i == 40);
        EXPECT_EQ(std::isnan(p.m[p.skew + i]), i == 40);
      }
    }
  }
}

// |g| = Inf makes LARS's ratio 0, and 0 Inf is NaN.
TEST(NotFinite, InfBecomesWhatTheFormulasSay) {
  Problem p(Type::kFloat32, 100), start = p;
  p.SetG(40, kInf);
  Lars(kLars, {true, false, true, false}, p.type, p.All(), Inline);
  for (int64_t i = 0; i < p.n; ++i) {
    if (i == 40) {
      EXPECT_TRUE(std::isnan(p.W(i)));
    } else {
      EXPECT_EQ(p.m[p.skew + i], 0.9f * start.m[p.skew + i]);
    }
  }
  Problem q(Type::kFloat32, 100);
  q.SetG(40, kInf);
  Lamb(kLamb, true, q.type, q.All(), Inline);
  EXPECT_EQ(q.m[q.skew + 40], kInf);
  EXPECT_EQ(q.v[q.skew + 40], kInf);
  EXPECT_TRUE(std::isnan(q.W(40)));  // Inf / Inf
  EXPECT_TRUE(std::isfinite(q.W(41)));
}

TEST(Clip, KeepsANaNRatio) {
  LarsNumbers rule = kLars;
  rule.trust = kNaN;
  Problem p(Type::kFloat32, 10);
  Lars(rule, {true, false, true, true}, p.type, p.All(), Inline);
  for (int64_t i = 0; i < p.n; ++i) EXPECT_TRUE(std::isnan(p.W(i)));
}

}  // namespace
}  // namespace optimizers
}  // namespace tfscale
