// Tests of custom_ops/sparse: exactly the k largest, whatever the numbers are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "custom_ops/sparse/select.h"

namespace tfscale {
namespace sparse {
namespace {

using Floats = std::vector<float>;
using Places = std::vector<int32_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kOffset = 1000;

void InTurn(int64_t parts, const std::function<void(int64_t, int64_t)>& work) { work(0, parts); }

void InThreads(int64_t parts, const std::function<void(int64_t, int64_t)>& work) {
  std::thread other([&] { work(0, parts / 2); });
  work(parts / 2, parts);
  other.join();
}

// By sorting.
Places Expected(const Floats& x, int64_t k) {
  const auto size = [&](int32_t i) { return std::isnan(x[i]) ? 2.0 * kInf : std::fabs(x[i]); };
  const auto larger = [&](int32_t a, int32_t b) {
    const bool first = std::isnan(x[a]), second = std::isnan(x[b]);
    return first != second ? first : !first && size(a) > size(b);
  };
  Places places(x.size());
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(), larger);
  places.resize(k);
  std::sort(places.begin(), places.end());
  for (int32_t& place : places) place += kOffset;
  return places;
}

Places Found(const Floats& x, int64_t k, const Runner& run) {
  Places places(k, -1);
  Largest(x.data(), x.size(), k, kOffset, places.data(), run);
  return places;
}

void ExpectLargest(const Floats& x, int64_t k) {
  const Places expected = Expected(x, k);
  EXPECT_EQ(Found(x, k, InTurn), expected) << x.size() << " numbers, " << k;
  EXPECT_EQ(Found(x, k, InThreads), expected) << x.size() << " numbers, " << k << ", in threads";
}

Floats Normal(int64_t n, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  Floats x(n);
  std::generate(x.begin(), x.end(), [&] { return draw(random); });
  return x;
}

std::vector<int64_t> Counts(int64_t n) {
  std::vector<int64_t> counts{0, 1, 2, n / 1000, n / 100, n / 10, n / 2, n - 1, n};
  counts.erase(
      std::remove_if(counts.begin(), counts.end(), [n](int64_t k) { return k < 0 || k > n; }),
      counts.end());
  return counts;
}

TEST(Largest, AreThoseThatSortingFinds) {
  for (int64_t n : {0, 1, 2, 31, 32, 33, 1000, 16384, 65536, 65537, 300001}) {
    for (int64_t k : Counts(n)) ExpectLargest(Normal(n), k);
  }
}

TEST(Largest, OfEqualOnesTheFirstCount) {
  for (int64_t n : {10, 70000}) {
    for (int64_t k : Counts(n)) {
      ExpectLargest(Floats(n, -2.0f), k);
      ExpectLargest(Floats(n, 0.0f), k);
      Floats few(n);
      for (int64_t i = 0; i < n; ++i) few[i] = static_cast<float>(i % 3) - 1;
      ExpectLargest(few, k);
    }
  }
}

TEST(Largest, FewThatAreNotZero) {
  Floats x(200000);
  for (int64_t i = 0; i < 50; ++i) x[i * 3001] = 1.0f + i;
  for (int64_t k : {1, 49, 50, 51, 2000}) ExpectLargest(x, k);
}

// What a sample of every so many numbers sees is not what there is.
TEST(Largest, WhereASampleIsWrong) {
  for (int64_t stride : {2, 4, 12, 16}) {
    Floats rare(200000, 1e-3f), common = Normal(200000);
    for (size_t i = 0; i < rare.size(); ++i) {
      if (static_cast<int64_t>(i) % stride == stride / 2) rare[i] = 5.0f;
      if (static_cast<int64_t>(i) % stride == stride / 2) common[i] = 0.0f;
    }
    for (int64_t k : {10, 2000, 100000}) {
      ExpectLargest(rare, k);
      ExpectLargest(common, k);
    }
  }
}

TEST(Largest, WhatIsNotFiniteAndWhatIsTiny) {
  Floats x = Normal(70000);
  x[5] = kNaN, x[70] = -kInf, x[700] = kInf, x[69999] = -kNaN;
  for (int64_t k : {1, 2, 3, 4, 100}) ExpectLargest(x, k);
  Floats tiny = Normal(1000);
  for (float& each : tiny) each *= 1e-40f;
  for (int64_t k : {1, 100, 999}) ExpectLargest(tiny, k);
}

TEST(Add, OneAfterTheOther) {
  Floats sums(4, 0.0f);
  const Floats values{1, 2, 4, 8};
  const Places places{3, 0, 3, 1};
  ASSERT_TRUE(Add(values.data(), places.data(), 4, sums.data(), 4));
  EXPECT_EQ(sums, (Floats{2, 8, 0, 5}));
}

TEST(Add, RefusesPlacesOfNobody) {
  for (int32_t wrong : {-1, 4, std::numeric_limits<int32_t>::min()}) {
    Floats sums(4, 0.0f);
    const Floats values{1, 2};
    const Places places{0, wrong};
    EXPECT_FALSE(Add(values.data(), places.data(), 2, sums.data(), 4));
    EXPECT_EQ(sums, Floats(4, 0.0f));
  }
}

}  // namespace
}  // namespace sparse
}  // namespace tfscale
