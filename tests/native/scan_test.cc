// Tests of custom_ops/search: the best classes against a sort of all sums.
#include "custom_ops/search/scan.h"

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
namespace search {
namespace {

using wire::Level;

std::vector<Level> Levels() {
  std::vector<Level> levels;
  for (Level level : {Level::kBase, Level::kAvx2, Level::kAvx512}) {
    if (wire::Available(level)) levels.push_back(level);
  }
  return levels;
}

struct Case {
  int64_t repetitions, samples, buckets, classes, k;
};

struct Data {
  std::vector<float> values;
  std::vector<int32_t> places;
  Problem problem;
};

template <typename Draw>
Data MakeData(const Case& c, const Draw& draw) {
  Data data;
  std::mt19937 random(1);
  data.values.resize(c.repetitions * c.samples * c.buckets);
  for (float& value : data.values) value = draw(random);
  for (int64_t i = 0; i < c.classes * c.repetitions; ++i) {
    const auto bucket = static_cast<int32_t>(random() % c.buckets);
    data.places.push_back(bucket + static_cast<int32_t>(i % c.repetitions * c.buckets));
  }
  data.problem = {
      data.values.data(), data.places.data(), c.repetitions, c.samples, c.buckets, c.classes, c.k};
  return data;
}

float SumOf(const Problem& p, int64_t sample, int64_t label) {
  float sum = 0;
  for (int64_t r = 0; r < p.repetitions; ++r) {
    const int64_t bucket = p.places[label * p.repetitions + r] - r * p.buckets;
    sum += p.values[(r * p.samples + sample) * p.buckets + bucket];
  }
  return sum;
}

struct Found {
  std::vector<float> sums;
  std::vector<int32_t> labels;
  bool operator==(const Found& other) const { return sums == other.sums && labels == other.labels; }
};

Found SortAll(const Problem& p) {
  Found found;
  for (int64_t s = 0; s < p.samples; ++s) {
    std::vector<float> sums(p.classes);
    for (int64_t c = 0; c < p.classes; ++c) sums[c] = SumOf(p, s, c);
    std::vector<int32_t> labels(p.classes);
    std::iota(labels.begin(), labels.end(), 0);
    std::stable_sort(labels.begin(), labels.end(),
                     [&](int32_t a, int32_t b) { return sums[a] > sums[b]; });
    for (int64_t i = 0; i < p.k; ++i) {
      found.sums.push_back(sums[labels[i]]);
      found.labels.push_back(labels[i]);
    }
  }
  return found;
}

void OneAfterAnother(int64_t parts, const Work& work) {
  for (int64_t i = 0; i < parts; ++i) work(i, i + 1);
}

void OnThreads(int64_t parts, const Work& work) {
  constexpr int64_t kThreads = 3;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { work(parts * t / kThreads, parts * (t + 1) / kThreads); });
  }
  for (std::thread& thread : threads) thread.join();
}

Found Search(const Problem& p, const Runner& runner, Level level) {
  std::vector<uint8_t> codes(CodeBytes(p), 77);
  Found found;
  found.sums.resize(p.samples * p.k);
  found.labels.resize(p.samples * p.k);
  EXPECT_TRUE(Best(p, codes.data(), found.sums.data(), found.labels.data(), runner, runner, level));
  return found;
}

template <typename Draw>
void ExpectBest(const Case& c, const Draw& draw) {
  const Data data = MakeData(c, draw);
  const Found expected = SortAll(data.problem);
  for (Level level : Levels()) {
    SCOPED_TRACE(LevelName(level));
    EXPECT_TRUE(Search(data.problem, OneAfterAnother, level) == expected);
    EXPECT_TRUE(Search(data.problem, OnThreads, level) == expected);
  }
}

// One lane to two groups of lanes; repetitions that four does not divide; buckets of several
// tiles; classes of several parts; k of one and of all.
constexpr Case kCases[] = {{1, 1, 2, 3, 3},     {3, 16, 5, 100, 7},     {4, 17, 70, 5000, 10},
                           {7, 70, 40, 900, 1}, {16, 3, 130, 9000, 10}, {256, 2, 2, 300, 20}};

TEST(Best, IsThatOfASort) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.classes);
    std::normal_distribution<float> normal;
    ExpectBest(c, [&](std::mt19937& random) { return normal(random); });
    ExpectBest(c, [&](std::mt19937& random) { return std::exp(3 * normal(random)); });
  }
}

TEST(Best, TakesTheFirstOfEqualSums) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.classes);
    ExpectBest(c, [](std::mt19937& random) { return static_cast<float>(random() % 3); });
    ExpectBest(c, [](std::mt19937&) { return 0.25f; });
  }
}

// Rounding of the sums is larger than a step of the codes.
TEST(Best, IsExactForLargeValuesThatHardlyDiffer) {
  std::uniform_real_distribution<float> little(0, 1);
  ExpectBest({16, 20, 30, 5000, 10}, [&](std::mt19937& random) { return 1e6f + little(random); });
}

TEST(Best, KnowsMaskedAndInfiniteValues) {
  std::normal_distribution<float> normal;
  for (float masked : {-1e30f, -std::numeric_limits<float>::infinity(), 1e38f}) {
    ExpectBest({4, 20, 30, 5000, 10},
               [&](std::mt19937& random) { return random() % 10 == 0 ? masked : normal(random); });
  }
}

TEST(Best, HasNaNLast) {
  Data data = MakeData({2, 1, 10, 500, 5}, [](std::mt19937& random) { return random() % 7 * 1.f; });
  for (int bucket : {0, 3}) data.values[bucket] = std::numeric_limits<float>::quiet_NaN();
  for (Level level : Levels()) {
    const Found found = Search(data.problem, OneAfterAnother, level);
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(found.sums[i], SumOf(data.problem, 0, found.labels[i]));
    }
    EXPECT_EQ(found.sums[0], 12);
  }
}

TEST(Best, RefusesPlacesOfOtherRepetitions) {
  for (int32_t wrong : {-1, 4, 1 << 30}) {
    Data data = MakeData({2, 1, 4, 100, 1}, [](std::mt19937&) { return 1.f; });
    data.places[2 * 60] = wrong;
    std::vector<uint8_t> codes(CodeBytes(data.problem));
    float sum;
    int32_t label;
    EXPECT_FALSE(Best(data.problem, codes.data(), &sum, &label, OneAfterAnother, OneAfterAnother));
  }
}

}  // namespace
}  // namespace search
}  // namespace tfscale
