// Tests of PowerSGD's passes: against plain sums, threads, instruction sets.
#include "custom_ops/compression/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

namespace tfscale {
namespace compression {
namespace {

using wire::Level;
using Floats = std::vector<float>;

std::vector<Level> Levels() {
  std::vector<Level> levels;
  for (Level level : {Level::kBase, Level::kAvx2, Level::kAvx512}) {
    if (wire::Available(level)) levels.push_back(level);
  }
  return levels;
}

void InTurn(int64_t parts, const Work& work) { work(0, parts); }

void InThreads(int64_t parts, const Work& work) {
  std::thread other([&] { work(0, parts / 2); });
  work(parts / 2, parts);
  other.join();
}

Floats Normal(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  Floats x(n);
  for (float& each : x) each = draw(random);
  return x;
}

struct Shape {
  int64_t rows, columns, rank;
};

const Shape kShapes[] = {{1, 1, 1},   {3, 5, 2},    {4, 16, 1},    {5, 17, 4},    {9, 300, 3},
                         {300, 9, 3}, {70, 513, 5}, {2, 40000, 2}, {600, 700, 4}, {90, 100, 70}};

// One step, as low_rank.h has it.
struct Step {
  Floats product, own, rest, sum;

  Step(const Shape& s, bool feedback, const Runner& run, Level level) {
    const int64_t size = s.rows * s.columns;
    Floats g = Normal(size, 1);
    rest = feedback ? Normal(size, 2) : Floats();
    const Floats factor = Normal(s.rank * s.columns, 3), basis = Normal(s.rows * s.rank, 4);
    const Floats total = Normal(s.rank * s.columns, 5);
    const Matrix m{g.data(), feedback ? rest.data() : nullptr, s.rows, s.columns, s.rank};
    product.resize(s.rows * s.rank);
    own.resize(s.rank * s.columns);
    Project(m, factor.data(), product.data(), run, level);
    Floats sums(Sums(m) * s.rank * s.columns);
    ProjectBack(m, basis.data(), sums.data(), own.data(), run, level);
    Finish(m, basis.data(), feedback ? own.data() : nullptr, total.data(), g.data(), run, level);
    sum = g;
  }
};

void ExpectNear(const Floats& found, const std::vector<double>& expected, double terms) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(found[i], expected[i], 1e-5 * std::sqrt(terms) + 1e-5) << i;
  }
}

TEST(LowRank, IsWhatTheProductsAre) {
  for (const Shape& s : kShapes) {
    for (bool feedback : {false, true}) {
      const Step step(s, feedback, InTurn, Level::kBase);
      const int64_t size = s.rows * s.columns;
      const Floats g = Normal(size, 1), before = Normal(size, 2);
      const Floats factor = Normal(s.rank * s.columns, 3), basis = Normal(s.rows * s.rank, 4);
      const Floats total = Normal(s.rank * s.columns, 5);
      std::vector<double> m(size), product(s.rows * s.rank), own(s.rank * s.columns);
      std::vector<double> sum(size), rest(size);
      for (int64_t i = 0; i < size; ++i)
        m[i] = static_cast<double>(g[i]) + (feedback ? before[i] : 0);
      for (int64_t i = 0; i < s.rows; ++i) {
        for (int64_t k = 0; k < s.rank; ++k) {
          for (int64_t j = 0; j < s.columns; ++j) {
            product[i * s.rank + k] += m[i * s.columns + j] * factor[k * s.columns + j];
            own[k * s.columns + j] += m[i * s.columns + j] * basis[i * s.rank + k];
          }
        }
      }
      for (int64_t i = 0; i < s.rows; ++i) {
        for (int64_t j = 0; j < s.columns; ++j) {
          double sent = 0;
          for (int64_t k = 0; k < s.rank; ++k) {
            sum[i * s.columns + j] += basis[i * s.rank + k] * total[k * s.columns + j];
            sent += static_cast<double>(basis[i * s.rank + k]) * step.own[k * s.columns + j];
          }
          rest[i * s.columns + j] = m[i * s.columns + j] - sent;
        }
      }
      ExpectNear(step.product, product, s.columns);
      ExpectNear(step.own, own, s.rows);
      ExpectNear(step.sum, sum, s.rank);
      if (feedback) ExpectNear(step.rest, rest, s.rank * s.rows);
    }
  }
}

TEST(LowRank, ThreadsAndInstructionSetsGiveTheSameBits) {
  for (const Shape& s : kShapes) {
    const Step base(s, true, InTurn, Level::kBase);
    for (Level level : Levels()) {
      for (const Runner& run : {Runner(InTurn), Runner(InThreads)}) {
        const Step other(s, true, run, level);
        EXPECT_EQ(other.product, base.product);
        EXPECT_EQ(other.own, base.own);
        EXPECT_EQ(other.rest, base.rest);
        EXPECT_EQ(other.sum, base.sum);
      }
    }
  }
}

}  // namespace
}  // namespace compression
}  // namespace tfscale
