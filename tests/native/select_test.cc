// Tests of custom_ops/compression: exactly the k largest, whatever the numbers are.
#include "custom_ops/compression/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace tfscale {
namespace compression {
namespace {

using Floats = std::vector<float>;
using Places = std::vector<int32_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
void InTurn(int64_t parts, const std::function<void(int64_t, int64_t)>& work) { work(0, parts); }

void InThreads(int64_t parts, const std::function<void(int64_t, int64_t)>& work) {
  std::thread other([&] { work(0, parts / 2); });
  work(parts / 2, parts);
  other.join();
}

// All places, those of the largest numbers first.
Places Sorted(const Floats& x) {
  const auto size = [&](int32_t i) { return std::isnan(x[i]) ? 2.0 * kInf : std::fabs(x[i]); };
  const auto larger = [&](int32_t a, int32_t b) {
    const bool first = std::isnan(x[a]), second = std::isnan(x[b]);
    return first != second ? first : !first && size(a) > size(b);
  };
  Places places(x.size());
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(), larger);
  return places;
}

Places First(Places sorted, int64_t k) {
  sorted.resize(k);
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

Places Found(const Floats& x, const Floats& rest, int64_t k, const Runner& run) {
  Places places(k, -1);
  Floats numbers(k, -1.0f);
  const float* more = rest.empty() ? nullptr : rest.data();
  Largest(x.data(), more, x.size(), k, places.data(), numbers.data(), run);
  for (int64_t i = 0; i < k; ++i) {
    const float number = more == nullptr ? x[places[i]] : x[places[i]] + more[places[i]];
    EXPECT_EQ(std::isnan(numbers[i]), std::isnan(number));
    if (!std::isnan(number)) {
      EXPECT_EQ(numbers[i], number);
    }
  }
  return places;
}

void ExpectLargest(const Floats& x, const std::vector<int64_t>& counts) {
  Floats half(x);
  for (float& each : half) each /= 2;
  Floats twice(half);
  std::transform(half.begin(), half.end(), half.begin(), twice.begin(), std::plus<>());
  const Places sorted = Sorted(x), of_sums = Sorted(twice);
  for (int64_t k : counts) {
    const Places expected = First(sorted, k);
    EXPECT_EQ(Found(x, {}, k, InTurn), expected) << x.size() << " numbers, " << k;
    EXPECT_EQ(Found(x, {}, k, InThreads), expected)
        << x.size() << " numbers, " << k << ", in threads";
    EXPECT_EQ(Found(half, half, k, InTurn), First(of_sums, k)) << x.size() << " sums, " << k;
  }
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
  for (int64_t n : {0, 1, 2, 31, 32, 33, 1000, 16384, 65537, 150001}) {
    ExpectLargest(Normal(n), Counts(n));
  }
}

TEST(Largest, OfEqualOnesTheFirstCount) {
  for (int64_t n : {10, 70000}) {
    ExpectLargest(Floats(n, -2.0f), Counts(n));
    ExpectLargest(Floats(n, 0.0f), Counts(n));
    Floats few(n);
    for (int64_t i = 0; i < n; ++i) few[i] = static_cast<float>(i % 3) - 1;
    ExpectLargest(few, Counts(n));
  }
}

TEST(Largest, FewThatAreNotZero) {
  Floats x(200000);
  for (int64_t i = 0; i < 50; ++i) x[i * 3001] = 1.0f + i;
  ExpectLargest(x, {1, 49, 50, 51, 2000});
}

// What a sample of every so many numbers sees is not what there is.
TEST(Largest, WhereASampleIsWrong) {
  for (int64_t stride : {2, 4, 12, 16}) {
    Floats rare(200000, 1e-3f), common = Normal(200000);
    for (size_t i = 0; i < rare.size(); ++i) {
      if (static_cast<int64_t>(i) % stride == stride / 2) rare[i] = 5.0f;
      if (static_cast<int64_t>(i) % stride == stride / 2) common[i] = 0.0f;
    }
    ExpectLargest(rare, {10, 2000, 100000});
    ExpectLargest(common, {10, 2000, 100000});
  }
}

TEST(Largest, WhatIsNotFiniteAndWhatIsTiny) {
  Floats x = Normal(70000);
  x[5] = kNaN, x[70] = -kInf, x[700] = kInf, x[69999] = -kNaN;
  ExpectLargest(x, {1, 2, 3, 4, 100});
  Floats tiny = Normal(1000);
  for (float& each : tiny) each *= 1e-40f;
  ExpectLargest(tiny, {1, 100, 999});
}

TEST(Keep, AllButWhatWasSent) {
  const Floats x = Normal(200000), before = Normal(200000, 2);
  for (const Runner& run : {Runner(InTurn), Runner(InThreads)}) {
    Floats rest = before;
    const Places places{0, 77, 65536, 199999};
    const Floats kept{0, 1, 2, 3};
    Keep(x.data(), rest.data(), x.size(), places.data(), kept.data(), 4, run);
    for (size_t i = 0, next = 0; i < x.size(); ++i) {
      const bool sent = next < 4 && places[next] == static_cast<int32_t>(i);
      ASSERT_EQ(rest[i], sent ? kept[next++] : before[i] + x[i]) << i;
    }
  }
}

TEST(Add, OneAfterTheOther) {
  Floats sums(4, 0.0f);
  const Floats values{1, 2, 4, 8};
  const Places places{3, 0, 3, 1};
  ASSERT_TRUE(AreWithin(places.data(), 4, 4));
  Add(values.data(), places.data(), 4, sums.data());
  EXPECT_EQ(sums, (Floats{2, 8, 0, 5}));
}

TEST(Places, OfNobodyAreSeen) {
  for (int32_t wrong : {-1, 4, std::numeric_limits<int32_t>::min()}) {
    EXPECT_FALSE(AreWithin(Places{0, wrong, 3}.data(), 3, 4));
  }
  EXPECT_TRUE(AreWithin(nullptr, 0, 0));
}

}  // namespace
}  // namespace compression
}  // namespace tfscale
