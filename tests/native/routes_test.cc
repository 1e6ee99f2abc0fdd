// Tests of routes: what goes from one rank to another, while the rest do something else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/formats.h"
#include "tests/native/world.h"

namespace tfscale {
namespace {

using wire::Element;
using wire::Format;

std::string Name(int rank) {
  return "rank " + std::to_string(rank) + " (worker " + std::to_string(rank) + ")";
}

bool Says(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

// How many numbers each rank has for each: sizes[from][to].
using Sizes = std::vector<std::vector<int64_t>>;

Sizes Equal(int ranks, int64_t size) { return Sizes(ranks, std::vector<int64_t>(ranks, size)); }

Sizes Random(int ranks, uint32_t seed) {
  std::minstd_rand generator(seed * 7919 + 1);
  Sizes sizes = Equal(ranks, 0);
  for (auto& row : sizes) {
    for (int64_t& size : row) size = generator() % 3 == 0 ? 0 : generator() % 900;
  }
  return sizes;
}

int64_t Sum(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// A route between all ranks: what each has, for whom, and where.
struct Routed {
  const Plan& plan;
  Format format = Format::kFp32;
  Element element = Element::kByte;
  int64_t piece = 256;
  bool ragged = false;

  Task TaskOf(int rank, const std::vector<int64_t>& brought,
              const std::vector<int64_t>& got) const {
    Task task;
    task.plan = &plan;
    task.format = format;
    task.element = element;
    const Program& program = *plan.programs[rank];
    task.layout = Layout::Routed(plan.chunks, program.brings, brought, program.gets, got, piece,
                                 format == Format::kFp32 ? 16 : wire::kBlock);
    return task;
  }
};

std::vector<int64_t> Column(const Sizes& sizes, int to) {
  std::vector<int64_t> column;
  for (const auto& row : sizes) column.push_back(row[to]);
  return column;
}

// The number that lies at `at` of what `from` has for `to`.
float Number(int from, int to, int64_t at) { return std::sin(from * 31.0f + to * 7.0f + at); }

std::shared_ptr<Buffers> BuffersOf(const Sizes& sizes, int rank) {
  Floats x;
  for (int to = 0; to < static_cast<int>(sizes.size()); ++to) {
    for (int64_t i = 0; i < sizes[rank][to]; ++i) x.push_back(Number(rank, to, i));
  }
  auto buffers = std::make_shared<Buffers>();
  buffers->x = BytesOf(x);
  buffers->y.assign(Sum(Column(sizes, rank)) * sizeof(float), 0xcd);
  return buffers;
}

// Floats that travel as bytes have four of them each.
std::vector<int64_t> Scaled(const Routed& routed, std::vector<int64_t> sizes) {
  for (int64_t& size : sizes) size *= routed.element == Element::kByte ? 4 : 1;
  return sizes;
}

Request RequestOf(World* world, const Routed& routed, const Sizes& sizes, int rank,
                  const std::shared_ptr<Buffers>& buffers) {
  const Task task =
      routed.TaskOf(rank, Scaled(routed, sizes[rank]), Scaled(routed, Column(sizes, rank)));
  Request request = world->MakeRequest(task, rank, buffers);
  request.ragged = routed.ragged;
  return request;
}

// What a wire makes of numbers; it cuts them into pieces.
Floats OverTheWire(const Routed& routed, const Floats& x) {
  if (routed.format == Format::kFp32) return x;
  const wire::Codec& codec = *wire::Find(routed.format, Element::kFloat32);
  Floats y(x.size());
  for (size_t at = 0; at < x.size(); at += routed.piece) {
    const int64_t n = std::min<int64_t>(routed.piece, x.size() - at);
    Bytes bytes(codec.Bytes(n));
    codec.Encode(x.data() + at, n, bytes.data(), wire::Rounding());
    codec.Decode(bytes.data(), n, y.data() + at);
  }
  return y;
}

void ExpectArrived(const Routed& routed, const Sizes& sizes, int rank, const Buffers& buffers) {
  Floats expected;
  for (int from = 0; from < static_cast<int>(sizes.size()); ++from) {
    Floats sent;
    for (int64_t i = 0; i < sizes[from][rank]; ++i) sent.push_back(Number(from, rank, i));
    const Floats came = from == rank ? sent : OverTheWire(routed, sent);
    expected.insert(expected.end(), came.begin(), came.end());
  }
  EXPECT_EQ(As<float>(buffers.y), expected) << Name(rank);
}

void ExpectRoutes(const Routed& routed, const Sizes& sizes) {
  World world(routed.plan.ranks, 2);
  std::vector<std::shared_ptr<Buffers>> all;
  Outcomes outcomes(routed.plan.ranks);
  for (int r = 0; r < routed.plan.ranks; ++r) {
    all.push_back(BuffersOf(sizes, r));
    world.rank(r).Start(RequestOf(&world, routed, sizes, r, all[r]), outcomes.For(r));
  }
  for (const Status& status : outcomes.Wait()) ASSERT_TRUE(status.ok()) << status.message();
  int64_t ideal = 0;
  for (int r = 0; r < routed.plan.ranks; ++r) {
    ExpectArrived(routed, sizes, r, *all[r]);
    for (int to = 0; to < routed.plan.ranks; ++to) ideal += to == r ? 0 : 4 * sizes[r][to];
  }
  if (routed.format == Format::kFp32) {
    EXPECT_EQ(world.traffic().bytes, ideal);
  }
}

class EveryAllToAll : public testing::TestWithParam<int> {
 protected:
  const Plan& plan() const { return PlanOf("all_to_all_" + std::to_string(GetParam())); }
};

INSTANTIATE_TEST_SUITE_P(Engine, EveryAllToAll, testing::Values(2, 3, 5, 8));

TEST_P(EveryAllToAll, BringsEachRankItsNumbersOfEachOverEveryWire) {
  for (const int64_t size : {0, 1, 63, 256, 1000}) {
    ExpectRoutes({plan()}, Equal(GetParam(), size));
    ExpectRoutes({plan(), Format::kFp32, Element::kFloat32}, Equal(GetParam(), size));
    for (const Format format : wire::Lossy()) {
      ExpectRoutes({plan(), format, Element::kFloat32}, Equal(GetParam(), size));
    }
  }
}

TEST_P(EveryAllToAll, BringsAsManyAsEachHas) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    const Format format = seed % 2 == 0 ? Format::kFp32 : Format::kInt8;
    const Element element = seed % 4 == 0 ? Element::kByte : Element::kFloat32;
    ExpectRoutes({plan(), format, element, 256, /*ragged=*/true}, Random(GetParam(), seed));
  }
}

TEST_P(EveryAllToAll, WhoHasNothingAndGetsNothingWaitsForNobody) {
  const Routed routed{plan(), Format::kFp32, Element::kByte, 256, /*ragged=*/true};
  World world(GetParam());
  const Sizes none = Equal(GetParam(), 0);
  Outcomes outcomes(1);
  world.rank(0).Start(RequestOf(&world, routed, none, 0, BuffersOf(none, 0)), outcomes.For(0));
  EXPECT_EQ(outcomes.left(), 0);
  EXPECT_TRUE(outcomes.Wait()[0].ok());
}

TEST(AllToAll, RanksThatDisagreeOnASizeAreRefused) {
  const Routed routed{PlanOf("all_to_all_3"), Format::kFp32, Element::kByte, 256, true};
  World world(3);
  Outcomes outcomes(3);
  for (int r = 0; r < 3; ++r) {
    Sizes sizes = Equal(3, 10);
    if (r == 2) sizes[1][2] = 11;  // rank 1 sends it fewer
    world.rank(r).Start(RequestOf(&world, routed, sizes, r, BuffersOf(sizes, r)), outcomes.For(r));
  }
  // Others may have all that they wait for before they hear of it.
  const std::vector<Status> statuses = outcomes.Wait();
  EXPECT_FALSE(statuses[2].ok());
  for (const Status& status : statuses) {
    EXPECT_TRUE(status.ok() || Says(status, "sizes differ")) << status.message();
  }
}

// -------------------------------------------------------------------- transfers

// Of "transfer_5": from rank 3 to rank 1.
constexpr int kSource = 3, kTarget = 1;

class Transfers {
 public:
  explicit Transfers(Patience patience = {kPatience}) : world(5, 0, 1, patience) {}

  Request RequestOf(int rank, int64_t size, const std::string& name = "activation") {
    const Routed routed{PlanOf("transfer_5"), Format::kFp32, Element::kByte, 256};
    const std::vector<int64_t> all = {size}, none;
    Task task = routed.TaskOf(rank, rank == kSource ? all : none, rank == kTarget ? all : none);
    task.name = name;
    auto buffers = std::make_shared<Buffers>();
    if (rank == kSource) buffers->x.assign(size, 7);
    if (rank == kTarget) buffers->y.assign(size, 0xcd);
    if (rank == kTarget) got = buffers;
    return world.MakeRequest(task, rank, buffers);
  }

  void Receive(int64_t size, const std::string& name = "activation") {
    Outcomes outcomes(1);
    world.rank(kTarget).Start(RequestOf(kTarget, size, name), outcomes.For(0));
    const Status status = outcomes.Wait()[0];
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(got->y, Bytes(size, 7));
  }

  // After a failure of the transfer: ranks that had no part in it give up what they start next.
  void ExpectOthersFail(const std::string& why) {
    Outcomes outcomes(3);
    int next = 0;
    for (int r : {0, 2, 4}) world.Start(task, r, outcomes.For(next++));
    for (const Status& status : outcomes.Wait()) EXPECT_TRUE(Says(status, why)) << status.message();
  }

  void ExpectGoesOn() {
    for (const Status& status : world.Run(task)) EXPECT_TRUE(status.ok()) << status.message();
  }

  World world;
  const Task task{PlanOf("ring_5"), 1000, 256};  // of all ranks
  std::shared_ptr<Buffers> got;
};

TEST(Transfer, NeedsNobodyElseAndSendsEachByteOnce) {
  for (const int64_t size : {0, 1, 255, 1000}) {
    Transfers transfers;
    Outcomes outcomes(1);
    transfers.world.rank(kSource).Start(transfers.RequestOf(kSource, size), outcomes.For(0));
    transfers.Receive(size);
    EXPECT_TRUE(outcomes.Wait()[0].ok());
    EXPECT_EQ(transfers.world.traffic().bytes, size);
  }
}

TEST(Transfer, EmptyOnesMustAgreeToo) {
  Transfers transfers;
  Outcomes outcomes(2);
  Request odd = transfers.RequestOf(kTarget, 0);
  odd.signature = "something else";
  transfers.world.rank(kSource).Start(transfers.RequestOf(kSource, 0), outcomes.For(0));
  transfers.world.rank(kTarget).Start(std::move(odd), outcomes.For(1));
  for (const Status& status : outcomes.Wait()) {
    EXPECT_TRUE(Says(status, Name(kTarget) + " runs something else")) << status.message();
  }
  transfers.ExpectOthersFail("ranks do not agree");
  transfers.ExpectGoesOn();
}

TEST(Transfer, ADeadTargetIsNamedWithTheTransfer) {
  Transfers transfers;
  Outcomes outcomes(1);
  transfers.world.rank(kSource).Start(transfers.RequestOf(kSource, 1000), outcomes.For(0));
  transfers.world.network().Kill(kTarget);
  const Status status = outcomes.Wait()[0];
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.message();
  EXPECT_TRUE(Says(status, "bucket 'activation': " + Name(kTarget) + " is gone"))
      << status.message();
}

// --------------------------------------------------------------------- detached

class Detached : public testing::Test {
 protected:
  // The outcome of the op that sends.
  std::shared_ptr<Outcomes> Send(const std::string& name = "activation", int64_t size = 1000) {
    auto outcomes = std::make_shared<Outcomes>(1);
    transfers_.world.rank(kSource).StartDetached(transfers_.RequestOf(kSource, size, name),
                                                 outcomes->For(0));
    return outcomes;
  }

  // What rank kSource starts next.
  Status Next(int64_t size = 10) {
    Outcomes outcomes(1);
    transfers_.world.rank(kSource).Start(transfers_.RequestOf(kSource, size, "next"),
                                         outcomes.For(0));
    return outcomes.Wait()[0];
  }

  Transfers transfers_;
};

TEST_F(Detached, ASendWaitsForNobody) {
  for (const int64_t size : {0, 1000}) {
    const auto sent = Send("activation", size);
    EXPECT_EQ(sent->left(), 0);
    EXPECT_TRUE(sent->Wait()[0].ok());
    transfers_.Receive(size);
  }
  transfers_.ExpectGoesOn();
}

TEST_F(Detached, TheNextOfItsNameWaitsUntilTheLastIsTaken) {
  const auto first = Send(), second = Send(), third = Send(), other = Send("another");
  EXPECT_EQ(first->left() + other->left(), 0);
  EXPECT_EQ(second->left(), 1);
  transfers_.Receive(1000);
  EXPECT_TRUE(second->Wait()[0].ok());
  EXPECT_EQ(third->left(), 1);
  transfers_.Receive(1000);
  EXPECT_TRUE(third->Wait()[0].ok());
  transfers_.Receive(1000);
  transfers_.Receive(1000, "another");
  transfers_.ExpectGoesOn();
}

TEST_F(Detached, ThoseOfOneNameMayBeSentWhileTheyAreTaken) {
  constexpr int kTimes = 50;
  std::thread target([&] {
    for (int i = 0; i < kTimes; ++i) transfers_.Receive(1000);
  });
  Outcomes outcomes(kTimes);
  Transfers source;  // only makes requests
  for (int i = 0; i < kTimes; ++i) {
    Request request = source.RequestOf(kSource, 1000);
    request.open = transfers_.RequestOf(kSource, 1000).open;
    transfers_.world.rank(kSource).StartDetached(std::move(request), outcomes.For(i));
  }
  for (const Status& status : outcomes.Wait()) EXPECT_TRUE(status.ok()) << status.message();
  target.join();
}

TEST_F(Detached, AFarewellFailsWhatComesNext) {
  EXPECT_TRUE(Send()->Wait()[0].ok());
  Outcomes told(1);
  transfers_.world.GiveUp(0, "enough", told.For(0), milliseconds(50));
  // Whether it has heard of it before or after it starts.
  const Status next = Next();
  EXPECT_TRUE(Says(next, Name(0) + " gave up: enough")) << next.message();
  told.Wait();
}

TEST_F(Detached, ThoseThatWaitInLineFailWithTheFirst) {
  const auto first = Send(), second = Send(), third = Send();
  EXPECT_TRUE(first->Wait()[0].ok());
  transfers_.world.network().Kill(kTarget);
  for (const auto& waiting : {second, third}) {
    const Status status = waiting->Wait()[0];
    EXPECT_TRUE(Says(status, "bucket 'activation': " + Name(kTarget) + " is gone"))
        << status.message();
  }
}

TEST_F(Detached, OneThatIsInTheWayCanBeGivenUp) {
  const auto first = Send(), second = Send();
  transfers_.world.rank(kSource).GiveUpDetached("activation", Status(Code::kCancelled, "enough"));
  const Status status = second->Wait()[0];
  EXPECT_EQ(status.code(), Code::kCancelled);
  EXPECT_TRUE(Says(status, "enough"));
}

TEST_F(Detached, AFailureThatNobodyWaitsForIsToldByWhatComesNext) {
  EXPECT_TRUE(Send()->Wait()[0].ok());
  transfers_.world.network().Kill(kTarget);
  std::this_thread::sleep_for(3 * Communicator::kStall);
  Outcomes outcomes(1);  // the next may be detached itself
  transfers_.world.rank(kSource).StartDetached(transfers_.RequestOf(kSource, 10, "next"),
                                               outcomes.For(0));
  const Status next = outcomes.Wait()[0];
  EXPECT_TRUE(Says(next, Name(kTarget) + " is gone")) << next.message();
}

}  // namespace
}  // namespace tfscale
