// Tests of what the engine computes: every schedule, over every wire, at many
// sizes, against a second interpreter that runs one move after another.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/native/formats.h"
#include "tests/native/world.h"

namespace tfscale {
namespace {

using wire::Element;
using wire::Format;

constexpr Element kElements[] = {Element::kFloat32, Element::kFloat64, Element::kInt32,
                                 Element::kInt64};
constexpr int64_t kSizes[] = {0, 1, 3, 255, 256, 257, 1000, 5000};

// ThreadSanitizer is slow, and few ranks show it all there is to see.
#ifdef __SANITIZE_THREAD__
constexpr int kMostRanks = 5, kSteps = 6;
#else
constexpr int kMostRanks = 16, kSteps = 30;
#endif
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

using BuffersPtr = std::shared_ptr<Buffers>;
using AllBuffers = std::vector<BuffersPtr>;

// ------------------------------------------------------------------- inputs

Floats Uniform(int64_t n, uint32_t seed) {
  std::minstd_rand generator(seed * 7919 + 1);
  Floats x(n);
  for (float& value : x) value = (generator() >> 7) * 0x1p-23f - 1.0f;
  return x;
}

// Numbers whose sums are exact in every type.
template <typename T>
std::vector<T> Whole(int64_t n, uint32_t seed) {
  std::minstd_rand generator(seed * 7919 + 1);
  std::vector<T> x(n);
  for (T& value : x) value = static_cast<T>(static_cast<int>(generator() >> 7) % 100 - 50);
  return x;
}

Bytes Whole(Element element, int64_t n, uint32_t seed) {
  switch (element) {
    case Element::kFloat64:
      return BytesOf(Whole<double>(n, seed));
    case Element::kInt32:
      return BytesOf(Whole<int32_t>(n, seed));
    case Element::kInt64:
      return BytesOf(Whole<int64_t>(n, seed));
    default:
      return BytesOf(Whole<float>(n, seed));
  }
}

std::vector<double> Widened(Element element, const uint8_t* data, int64_t n) {
  const Bytes bytes(data, data + n * wire::Find(Format::kFp32, element)->element_bytes());
  auto widen = [](const auto& numbers) {
    return std::vector<double>(numbers.begin(), numbers.end());
  };
  switch (element) {
    case Element::kFloat64:
      return As<double>(bytes);
    case Element::kInt32:
      return widen(As<int32_t>(bytes));
    case Element::kInt64:
      return widen(As<int64_t>(bytes));
    default:
      return widen(As<float>(bytes));
  }
}

AllBuffers RandomInputs(const Task& task, uint32_t seed, bool residuals = false) {
  AllBuffers all;
  for (int r = 0; r < task.ranks(); ++r) {
    all.push_back(std::make_shared<Buffers>());
    all[r]->x = BytesOf(Uniform(task.count(), seed * 100 + r));
    if (residuals) all[r]->residual = Uniform(task.count(), seed * 100 + r + 50);
  }
  return all;
}

AllBuffers WholeInputs(const Task& task, uint32_t seed) {
  AllBuffers all;
  for (int r = 0; r < task.ranks(); ++r) {
    all.push_back(std::make_shared<Buffers>());
    all[r]->x = Whole(task.element, task.count(), seed * 100 + r);
  }
  return all;
}

Floats Result(const Buffers& buffers, int64_t n) {
  return As<float>(Bytes(buffers.Result(), buffers.Result() + n * sizeof(float)));
}

// ------------------------------------------------- what the ranks must agree on

// The ranks whose result at this chunk is defined.
bool Defined(const Task& task, int rank, int chunk) {
  return task.plan->goal != Goal::kReduceScatter || rank == chunk;
}

template <typename Visit>
void ForPieces(const Task& task, Visit visit) {
  for (int64_t part = 0; part < task.layout.parts(); ++part) {
    for (int c = 0; c < task.layout.chunks(); ++c) visit(task.layout.piece(part, c), c);
  }
}

// Who brings what into the sum of a chunk: all, or in a gather and a broadcast
// its owner.
bool Contributes(const Task& task, int rank, int chunk) {
  const Goal goal = task.plan->goal;
  if (goal == Goal::kAllReduce || goal == Goal::kReduceScatter) return true;
  for (const Move& move : task.plan->programs[rank]->moves) {
    if (move.kind == Kind::kFinalise && move.first <= chunk && chunk < move.last) return true;
  }
  return false;
}

std::vector<double> ExactSum(const Task& task, const std::vector<Bytes>& x) {
  std::vector<double> sum(task.count(), 0.0);
  for (int r = 0; r < task.ranks(); ++r) {
    const std::vector<double> mine = Widened(task.element, x[r].data(), task.count());
    ForPieces(task, [&](Span span, int c) {
      if (!Contributes(task, r, c)) return;
      for (int64_t i = span.first; i < span.first + span.count; ++i) sum[i] += mine[i];
    });
  }
  if (task.mean) {
    for (double& value : sum) value /= task.ranks();
  }
  return sum;
}

std::vector<Bytes> InputsOf(const AllBuffers& all) {
  std::vector<Bytes> x;
  for (const BuffersPtr& buffers : all) x.push_back(buffers->x);
  return x;
}

void ExpectSameBitsEverywhere(const Task& task, const AllBuffers& all) {
  const int64_t size = task.codec().element_bytes();
  ForPieces(task, [&](Span span, int c) {
    for (int r = 0; r < task.ranks() && task.plan->goal != Goal::kReduceScatter; ++r) {
      ASSERT_EQ(std::memcmp(all[r]->Result() + span.first * size,
                            all[0]->Result() + span.first * size, span.count * size),
                0)
          << "rank " << r << ", chunk " << c;
    }
  });
}

void ExpectExactly(const Task& task, const AllBuffers& all, const std::vector<double>& expected) {
  for (int r = 0; r < task.ranks(); ++r) {
    const std::vector<double> result = Widened(task.element, all[r]->Result(), task.count());
    ForPieces(task, [&](Span span, int c) {
      if (!Defined(task, r, c)) return;
      for (int64_t i = span.first; i < span.first + span.count; ++i) {
        const bool narrow = task.element == Element::kFloat32;
        ASSERT_EQ(result[i], narrow ? static_cast<float>(expected[i]) : expected[i])
            << "rank " << r << ", number " << i;
      }
    });
  }
}

// ------------------------------------------------------ the second interpreter

// Runs all ranks of one part after another, each move alone, with plain copies.
class Interpreter {
 public:
  Interpreter(const Task& task, const AllBuffers& inputs) : task_(task), codec_(task.codec()) {
    for (const BuffersPtr& one : inputs) {
      now_.push_back(As<float>(one->x));
      for (size_t i = 0; i < one->residual.size(); ++i) now_.back()[i] += one->residual[i];
      lost_.emplace_back(now_.back().size(), 0.0f);
    }
    for (int64_t part = 0; part < task.layout.parts(); ++part) RunPart(part);
  }

  const Floats& result(int rank) const { return now_[rank]; }
  const Floats& lost(int rank) const { return lost_[rank]; }
  int64_t messages() const { return messages_; }
  int64_t bytes() const { return bytes_; }

 private:
  using Address = std::tuple<int, int, bool, int, int>;  // from, to, final, first, last

  void RunPart(int64_t part) {
    part_ = part;
    mail_.clear();
    final_.clear();
    std::vector<size_t> next(task_.ranks(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < task_.ranks(); ++r) {
        const auto& moves = task_.plan->programs[r]->moves;
        while (next[r] < moves.size() && Do(r, moves[next[r]])) {
          ++next[r];
          moved = true;
        }
      }
    }
    for (int r = 0; r < task_.ranks(); ++r) {
      ASSERT_EQ(next[r], task_.plan->programs[r]->moves.size()) << "rank " << r << " is stuck";
    }
  }

  bool Do(int rank, const Move& move) {
    Bytes* letter = nullptr;
    if (move.receives()) {
      auto found = mail_.find({move.peer, rank, move.final, move.first, move.last});
      if (found == mail_.end()) return false;
      letter = &found->second;
    }
    Bytes joined;
    size_t read = 0;
    for (int c = move.first; c < move.last; ++c) {
      const Span span = task_.layout.piece(part_, c);
      Bytes bytes(codec_.Bytes(span.count));
      if (letter != nullptr) std::copy_n(letter->begin() + read, bytes.size(), bytes.begin());
      read += bytes.size();
      Floats here(now_[rank].begin() + span.first, now_[rank].begin() + span.first + span.count);
      switch (move.kind) {
        case Kind::kSend:
          bytes = move.final ? final_[{rank, c}] : Encoded(rank, here, span, 1.0f);
          joined.insert(joined.end(), bytes.begin(), bytes.end());
          break;
        case Kind::kAdd:
          codec_.DecodeAdd(bytes.data(), span.count, here.data(), here.data());
          break;
        case Kind::kFinalise:
          bytes = Finalise(rank, &here, span);
          [[fallthrough]];
        case Kind::kKeep:
          final_[{rank, c}] = bytes;
          codec_.Decode(bytes.data(), span.count, here.data());
          if (exact_) here = exact_sum_;
          break;
      }
      exact_ = false;
      std::copy(here.begin(), here.end(), now_[rank].begin() + span.first);
    }
    if (move.kind == Kind::kSend) {
      messages_ += !joined.empty();
      bytes_ += joined.size();
      mail_[{rank, move.peer, move.final, move.first, move.last}] = joined;
    }
    return true;
  }

  Bytes Finalise(int rank, Floats* here, const Span& span) {
    const float divisor = task_.mean ? task_.ranks() : 1;
    for (float& value : *here) value /= divisor;
    exact_ = task_.plan->goal == Goal::kReduceScatter;  // nobody needs its bytes
    if (exact_) exact_sum_ = *here;
    return exact_ ? Bytes(codec_.Bytes(span.count)) : Encoded(rank, *here, span, divisor);
  }

  Bytes Encoded(int rank, const Floats& before, const Span& span, float times) {
    Bytes bytes(codec_.Bytes(span.count));
    Floats after(span.count);
    codec_.Encode(before.data(), span.count, bytes.data(), task_.rounding);
    codec_.Decode(bytes.data(), span.count, after.data());
    for (int64_t i = 0; i < span.count; ++i) {
      const float loss = before[i] - after[i];
      lost_[rank][span.first + i] = loss * times;
    }
    return bytes;
  }

  const Task& task_;
  const wire::Codec& codec_;
  std::vector<Floats> now_, lost_;
  int64_t messages_ = 0, bytes_ = 0;
  int64_t part_ = 0;
  bool exact_ = false;
  Floats exact_sum_;
  std::map<Address, Bytes> mail_;
  std::map<std::pair<int, int>, Bytes> final_;
};

void ExpectLikeInterpreter(const Task& task, const AllBuffers& all, const Interpreter& expected) {
  for (int r = 0; r < task.ranks(); ++r) {
    const Floats result = Result(*all[r], task.count());
    ForPieces(task, [&](Span span, int c) {
      if (!Defined(task, r, c)) return;
      ASSERT_EQ(std::memcmp(result.data() + span.first, expected.result(r).data() + span.first,
                            span.count * sizeof(float)),
                0)
          << "rank " << r << ", chunk " << c;
    });
    if (all[r]->residual.empty()) continue;
    for (int64_t i = 0; i < task.count(); ++i) {
      ASSERT_EQ(all[r]->new_residual[i], expected.lost(r)[i]) << "rank " << r << ", number " << i;
    }
  }
}

// ----------------------------------------------------------------- the grids

class EverySchedule : public testing::TestWithParam<Plan> {
 protected:
  const Plan& plan() const { return GetParam(); }
  bool Sums() const {
    return plan().goal == Goal::kAllReduce || plan().goal == Goal::kReduceScatter;
  }
};

std::string PlanName(const testing::TestParamInfo<Plan>& info) { return info.param.name; }

// Mixtures and routes have tests of their own.
bool Sums(Goal goal) { return goal != Goal::kMixture && goal != Goal::kRoute; }

std::vector<Plan> AllPlans() {
  std::vector<Plan> plans;
  for (const Plan& plan : Plans()) {
    if (plan.ranks <= kMostRanks && Sums(plan.goal)) plans.push_back(plan);
  }
  return plans;
}

INSTANTIATE_TEST_SUITE_P(Engine, EverySchedule, testing::ValuesIn(AllPlans()), PlanName);

TEST_P(EverySchedule, SumsEveryTypeExactly) {
  World quiet(plan().ranks, 0), shuffled(plan().ranks, 3, 5);
  uint32_t i = 0;
  for (int64_t size : kSizes) {
    for (Element element : kElements) {
      Task task(plan(), size, 256 << (i % 2));
      task.element = element;
      task.in_place = i % 3 == 0;
      const bool integer = element == Element::kInt32 || element == Element::kInt64;
      task.mean = Sums() && !integer && i % 5 < 2;
      const AllBuffers all = WholeInputs(task, ++i);
      const std::vector<double> expected = ExactSum(task, InputsOf(all));
      SCOPED_TRACE(testing::Message() << size << " numbers, element " << static_cast<int>(element)
                                      << ", mean " << task.mean << ", in place " << task.in_place);
      ASSERT_NO_FATAL_FAILURE((i % 4 == 0 ? shuffled : quiet).Run(task, all));
      ASSERT_NO_FATAL_FAILURE(ExpectExactly(task, all, expected));
    }
  }
}

TEST_P(EverySchedule, DoesOnEveryWireWhatItsMovesSay) {
  World quiet(plan().ranks, 0), shuffled(plan().ranks, 3, 7);
  uint32_t i = 0;
  for (const wire::Facts& facts : wire::kFacts) {
    const Format format = facts.format;
    for (int64_t size : {int64_t{1}, int64_t{257}, int64_t{2500}}) {
      Task task(plan(), size, 256, format);
      task.in_place = i % 2 == 0;
      task.mean = Sums() && i % 3 == 0;
      const bool residuals = Sums() && format != Format::kFp32 && i % 4 != 0;
      const AllBuffers all = RandomInputs(task, ++i, residuals);
      const Interpreter expected(task, all);
      World& world = i % 4 == 0 ? shuffled : quiet;
      world.traffic().messages = world.traffic().bytes = 0;
      SCOPED_TRACE(testing::Message() << task.codec().name() << ", " << size << " numbers, mean "
                                      << task.mean << ", in place " << task.in_place);
      ASSERT_NO_FATAL_FAILURE(world.Run(task, all));
      ASSERT_NO_FATAL_FAILURE(ExpectLikeInterpreter(task, all, expected));
      ASSERT_NO_FATAL_FAILURE(ExpectSameBitsEverywhere(task, all));
      ASSERT_EQ(world.traffic().messages, expected.messages());
      ASSERT_EQ(world.traffic().bytes, expected.bytes());
    }
  }
}

// In a mixture each rank has a result of its own.
std::vector<double> ExactMixture(const Task& task, const std::vector<Bytes>& x, int rank) {
  std::vector<double> sum = Widened(task.element, x[rank].data(), task.count());
  for (const Move& move : task.plan->programs[rank]->moves) {
    if (move.kind != Kind::kAdd) continue;
    const std::vector<double> theirs = Widened(task.element, x[move.peer].data(), task.count());
    for (int64_t i = 0; i < task.count(); ++i) sum[i] += theirs[i];
  }
  return sum;
}

class EveryMixture : public EverySchedule {};

INSTANTIATE_TEST_SUITE_P(Engine, EveryMixture,
                         testing::ValuesIn(PlansFor(Goal::kMixture, kMostRanks)), PlanName);

TEST_P(EveryMixture, AddsWhatComesAndLeavesWhatIsSent) {
  World quiet(plan().ranks, 0), shuffled(plan().ranks, 3, 5);
  uint32_t i = 0;
  for (int64_t size : kSizes) {
    for (Element element : kElements) {
      Task task(plan(), size, 256);
      task.element = element;
      const AllBuffers all = WholeInputs(task, ++i);
      const std::vector<Bytes> before = InputsOf(all);
      SCOPED_TRACE(testing::Message() << size << " numbers, element " << static_cast<int>(element));
      ASSERT_NO_FATAL_FAILURE((i % 2 == 0 ? shuffled : quiet).Run(task, all));
      for (int r = 0; r < task.ranks(); ++r) {
        ASSERT_EQ(Widened(element, all[r]->Result(), task.count()), ExactMixture(task, before, r))
            << "rank " << r;
        ASSERT_EQ(all[r]->x, before[r]) << "rank " << r;
      }
    }
  }
}

// What rounding takes from receivers the sender keeps.
TEST_P(EveryMixture, LosesNothingOnAWire) {
  World world(plan().ranks, 0);
  for (Format format : wire::Lossy()) {
    const Task task(plan(), 3000, 256, format);
    const AllBuffers all = WholeInputs(task, 1);
    const std::vector<Bytes> before = InputsOf(all);
    SCOPED_TRACE(task.codec().name());
    ASSERT_NO_FATAL_FAILURE(world.Run(task, all));
    std::vector<double> given(task.count()), found(task.count());
    for (int r = 0; r < task.ranks(); ++r) {
      int sent = 0;
      for (const Move& move : task.plan->programs[r]->moves) sent += move.kind == Kind::kSend;
      const std::vector<double> x = Widened(task.element, before[r].data(), task.count());
      const std::vector<double> y = Widened(task.element, all[r]->Result(), task.count());
      for (int64_t i = 0; i < task.count(); ++i) given[i] += (1 + sent) * x[i], found[i] += y[i];
    }
    for (int64_t i = 0; i < task.count(); ++i) ASSERT_NEAR(found[i], given[i], 1e-3);
  }
}

class EveryAllReduce : public EverySchedule {};

INSTANTIATE_TEST_SUITE_P(Engine, EveryAllReduce, testing::ValuesIn(PlansFor(Goal::kAllReduce, 8)),
                         PlanName);

TEST_P(EveryAllReduce, RunsManyParts) {
  World world(plan().ranks, 3, 11);
  for (Format format : {Format::kFp32, Format::kInt8}) {
    const Task task(plan(), 70000, 512, format);
    const AllBuffers all = RandomInputs(task, 1);
    const Interpreter expected(task, all);
    ASSERT_NO_FATAL_FAILURE(world.Run(task, all));
    ASSERT_NO_FATAL_FAILURE(ExpectLikeInterpreter(task, all, expected));
  }
}

TEST_P(EveryAllReduce, StaysWithinWhatItsEncodingsMayLose) {
  World world(plan().ranks);
  for (bool stochastic : {false, true}) {
    for (Format format : wire::Lossy()) {
      Task task(plan(), 1000, 256, format);
      task.rounding.stochastic = stochastic;
      const AllBuffers all = RandomInputs(task, 1);
      const std::vector<double> exact = ExactSum(task, InputsOf(all));
      ASSERT_NO_FATAL_FAILURE(world.Run(task, all));
      // Each rank encodes a partial sum of at most P numbers of at most 1.
      const double bound =
          plan().ranks * wire::Worst(format) * (1 + stochastic) * plan().ranks * 1.01;
      const Floats result = Result(*all[0], task.count());
      for (int64_t i = 0; i < task.count(); ++i) {
        ASSERT_LE(std::fabs(result[i] - exact[i]), bound) << task.codec().name() << ", " << i;
      }
    }
  }
}

TEST_P(EveryAllReduce, RoundsAtRandomButReproducibly) {
  World quiet(plan().ranks, 0), shuffled(plan().ranks, 3, 13);
  auto run = [&](World* world, uint64_t seed) {
    Task task(plan(), 3000, 256, Format::kInt4);
    task.rounding.stochastic = true;
    task.rounding.seed = seed;
    const AllBuffers all = RandomInputs(task, 1);
    world->Run(task, all);
    return all[0]->y;
  };
  const Bytes once = run(&quiet, 42);
  EXPECT_EQ(once, run(&quiet, 42));
  EXPECT_EQ(once, run(&shuffled, 42));
  EXPECT_NE(once, run(&quiet, 43));
}

// --------------------------------------------------------------- error feedback

// Over all ranks, what went in is what came out and what is remembered.
void ExpectNothingLost(const Task& task, const AllBuffers& all, const std::vector<Bytes>& x) {
  std::vector<double> in(task.count(), 0.0), out(task.count(), 0.0), size(task.count(), 1.0);
  for (int r = 0; r < task.ranks(); ++r) {
    const Floats mine = As<float>(x[r]), result = Result(*all[r], task.count());
    for (int64_t i = 0; i < task.count(); ++i) {
      in[i] += double{mine[i]} + double{all[r]->residual[i]};
      out[i] += double{all[r]->new_residual[i]};
      size[i] += std::fabs(mine[i]) + std::fabs(all[r]->residual[i]) + std::fabs(result[i]);
    }
    ForPieces(task, [&](Span span, int c) {
      const bool counts = task.plan->goal == Goal::kReduceScatter ? r == c : r == 0;
      for (int64_t i = span.first; counts && i < span.first + span.count; ++i) {
        out[i] += double{result[i]} * (task.mean ? task.ranks() : 1);
      }
    });
  }
  for (int64_t i = 0; i < task.count(); ++i) {
    ASSERT_NEAR(in[i], out[i], 0x1p-19 * size[i] * task.ranks()) << "number " << i;
  }
}

class EveryReduction : public EverySchedule {};

std::vector<Plan> Reductions() {
  std::vector<Plan> plans = PlansFor(Goal::kAllReduce, 6);
  for (const Plan& plan : PlansFor(Goal::kReduceScatter, 6)) plans.push_back(plan);
  return plans;
}

INSTANTIATE_TEST_SUITE_P(Engine, EveryReduction, testing::ValuesIn(Reductions()), PlanName);

TEST_P(EveryReduction, LosesNothingOverManySteps) {
  World world(plan().ranks);
  for (Format format : wire::Lossy()) {
    Task task(plan(), 600, 256, format);
    std::vector<Floats> residuals(plan().ranks, Floats(task.count(), 0.0f));
    for (int step = 0; step < kSteps; ++step) {
      task.mean = step % 2 == 1;
      task.rounding.stochastic = step % 4 >= 2;
      task.rounding.seed = step;
      task.in_place = step % 3 == 0;
      const AllBuffers all = RandomInputs(task, step);
      for (int r = 0; r < plan().ranks; ++r) all[r]->residual = residuals[r];
      const std::vector<Bytes> x = InputsOf(all);
      SCOPED_TRACE(testing::Message() << task.codec().name() << ", step " << step);
      ASSERT_NO_FATAL_FAILURE(world.Run(task, all));
      ASSERT_NO_FATAL_FAILURE(ExpectNothingLost(task, all, x));
      for (int r = 0; r < plan().ranks; ++r) residuals[r] = all[r]->new_residual;
    }
  }
}

TEST_P(EveryReduction, LosslessWireLeavesNoResidual) {
  World world(plan().ranks);
  const Task task(plan(), 600, 256);
  const AllBuffers all = RandomInputs(task, 1, true);
  ASSERT_NO_FATAL_FAILURE(world.Run(task, all));
  ASSERT_NO_FATAL_FAILURE(ExpectNothingLost(task, all, InputsOf(all)));
  for (const auto& one : all) EXPECT_EQ(one->new_residual, Floats(task.count(), 0.0f));
}

TEST_P(EveryAllReduce, KeepsResidualsWhenTheResultIsNotFinite) {
  World world(plan().ranks);
  for (Format format : wire::Lossy()) {
    const Task task(plan(), 1500, 256, format);
    for (float bad : {kNaN, kInf, -kInf}) {
      for (int64_t at : {int64_t{0}, int64_t{700}, int64_t{1499}}) {
        const AllBuffers all = RandomInputs(task, 1, true);
        Floats x = As<float>(all.back()->x);
        x[at] = bad;
        all.back()->x = BytesOf(x);
        ASSERT_NO_FATAL_FAILURE(world.Run(task, all));
        SCOPED_TRACE(testing::Message() << task.codec().name() << ", " << bad << " at " << at);
        for (const auto& one : all) {
          ASSERT_FALSE(std::isfinite(Result(*one, task.count())[at]));
          ASSERT_EQ(BytesOf(one->new_residual), BytesOf(one->residual));
        }
      }
    }
    const AllBuffers clean = RandomInputs(task, 2, true);
    ASSERT_NO_FATAL_FAILURE(world.Run(task, clean));
    for (float value : Result(*clean[0], task.count())) ASSERT_TRUE(std::isfinite(value));
    ASSERT_NO_FATAL_FAILURE(ExpectNothingLost(task, clean, InputsOf(clean)));
  }
}

TEST(ReduceScatter, ResidualsStayFiniteWhenTheResultIsNot) {
  const Plan& plan = PlanOf("reduce_scatter_ring_4");
  World world(plan.ranks);
  const Task task(plan, 1024, 256, Format::kInt8);
  const AllBuffers all = RandomInputs(task, 1, true);
  all[1]->x = BytesOf(Floats(task.count(), kNaN));
  ASSERT_NO_FATAL_FAILURE(world.Run(task, all));
  for (const auto& one : all) {
    for (float value : one->new_residual) ASSERT_TRUE(std::isfinite(value));
  }
  EXPECT_EQ(all[1]->new_residual[1], all[1]->residual[1]);
}

// -------------------------------------------------------------------- threads

TEST(Engine, RanksMayRunInThreadsOfTheirOwn) {
  for (const char* name : {"ring_8", "tree_7", "halving_6", "direct_5", "groups_9", "central_4"}) {
    const Plan& plan = PlanOf(name);
    World world(plan.ranks);
    for (uint32_t round = 0; round < 5; ++round) {
      const Task task(plan, 6000, 256, round % 2 ? Format::kInt8 : Format::kFp32);
      const AllBuffers all = RandomInputs(task, round);
      const Interpreter expected(task, all);
      Outcomes outcomes(plan.ranks);
      std::vector<std::thread> threads;
      for (int r = 0; r < plan.ranks; ++r) {
        threads.emplace_back([&, r] { world.Start(task, r, all[r], outcomes.For(r)); });
      }
      for (auto& thread : threads) thread.join();
      for (const Status& status : outcomes.Wait()) ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_NO_FATAL_FAILURE(ExpectLikeInterpreter(task, all, expected));
    }
  }
}

TEST(Engine, ManyCollectivesRunAtOnceInAnyOrder) {
  constexpr int kBuckets = 64;
  const Plan& plan = PlanOf("ring_8");
  World world(plan.ranks, 3);
  std::vector<Task> tasks;
  std::vector<AllBuffers> buffers;
  for (int b = 0; b < kBuckets; ++b) {
    tasks.emplace_back(plan, 100 + 37 * b, 256, b % 2 ? Format::kFp32 : Format::kInt8);
    tasks.back().name = "bucket " + std::to_string(b);
    buffers.push_back(RandomInputs(tasks.back(), b));
  }
  Outcomes outcomes(kBuckets * plan.ranks);
  for (int i = 0; i < kBuckets; ++i) {
    for (int r = 0; r < plan.ranks; ++r) {
      const int b = (i * (2 * r + 1) + r) % kBuckets;  // another order on each rank
      world.Start(tasks[b], r, buffers[b][r], outcomes.For(b * plan.ranks + r));
    }
  }
  for (const Status& status : outcomes.Wait()) ASSERT_TRUE(status.ok()) << status.message();
  for (int b = 0; b < kBuckets; ++b) {
    const Interpreter expected(tasks[b], buffers[b]);
    ASSERT_NO_FATAL_FAILURE(ExpectLikeInterpreter(tasks[b], buffers[b], expected));
  }
}

}  // namespace
}  // namespace tfscale
