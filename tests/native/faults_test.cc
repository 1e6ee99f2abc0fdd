// Tests of what happens when ranks disagree, die, fall silent or give up: all
// ranks fail for the reason that is true, and the group can go on.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/world.h"

namespace tfscale {
namespace {

using wire::Format;

std::string Name(int rank) {
  return "rank " + std::to_string(rank) + " (worker " + std::to_string(rank) + ")";
}

bool Says(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

int Mentions(const std::string& text, const std::string& word) {
  int count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

void ExpectAll(const std::vector<Status>& statuses, Code code, const std::string& text) {
  for (size_t r = 0; r < statuses.size(); ++r) {
    EXPECT_EQ(statuses[r].code(), code) << r << ": " << statuses[r].message();
    EXPECT_TRUE(Says(statuses[r], text)) << r << ": " << statuses[r].message();
  }
}

void ExpectGoesOn(World* world, const Task& task) { ExpectAll(world->Run(task), Code::kOk, ""); }

Task Signed(Task task) {
  task.signature =
      task.plan->name + " " + std::to_string(task.count()) + " " + std::string(task.codec().name());
  return task;
}

class Faults : public testing::TestWithParam<const char*> {
 protected:
  const Plan& plan() const { return PlanOf(GetParam()); }
  int ranks() const { return plan().ranks; }
  Task Usual() const { return Signed(Task(plan(), 3000, 256)); }

  // Starts all ranks but one, and thereby keeps the others from finishing.
  std::vector<std::shared_ptr<Collective>> StartAllBut(World* world, int rank, const Task& task,
                                                       Outcomes* outcomes) const {
    std::vector<std::shared_ptr<Collective>> running(ranks());
    for (int r = 0; r < ranks(); ++r) {
      if (r != rank) running[r] = world->Start(task, r, outcomes->For(r));
    }
    return running;
  }
};

// Until then the last rank must not start, or some would finish all the same.
// The others hear of a failure without it, in every schedule here.
void WaitForAllButOne(const Outcomes& outcomes) {
  while (outcomes.left() > 1) std::this_thread::sleep_for(milliseconds(20));
}

INSTANTIATE_TEST_SUITE_P(Engine, Faults,
                         testing::Values("ring_2", "ring_5", "tree_6", "halving_5", "central_5"),
                         [](const auto& info) { return std::string(info.param); });

// ---------------------------------------------------------------- disagreement

TEST_P(Faults, RanksThatDisagreeAreNamedAndTheGroupGoesOn) {
  World world(ranks(), 0, 1, {milliseconds(30000)});
  const std::string other_plan = "central_" + std::to_string(ranks());
  const std::vector<Task> odd = {
      Signed(Task(plan(), 2999, 256)), Signed(Task(plan(), 3000, 256, Format::kInt8)),
      Signed(Task(PlanOf(GetParam() == other_plan ? "ring_5" : other_plan), 3000, 256)),
      Signed(Task(plan(), 0, 256)), Signed(Task(plan(), 70000, 256))};
  for (size_t round = 0; round < odd.size(); ++round) {
    const int who = static_cast<int>(round) % ranks();
    std::vector<Task> tasks(ranks(), Usual());
    tasks[who] = odd[round];
    SCOPED_TRACE(Name(who) + " runs " + odd[round].signature);
    for (const Status& status : world.Run(tasks)) {
      EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.message();
      EXPECT_TRUE(Says(status, "ranks do not agree")) << status.message();
      EXPECT_TRUE(Says(status, Name(who) + " runs " + odd[round].signature)) << status.message();
      EXPECT_TRUE(Says(status, "runs " + Usual().signature)) << status.message();
      EXPECT_EQ(Mentions(status.message(), "(worker "), 2) << status.message();
    }
    ExpectGoesOn(&world, Usual());
  }
}

TEST_P(Faults, EmptyCollectivesMustAgreeToo) {
  World world(ranks());
  const Task empty = Signed(Task(plan(), 0, 256));
  ExpectGoesOn(&world, empty);
  std::vector<Task> tasks(ranks(), empty);
  tasks.back().signature = "something else";
  ExpectAll(world.Run(tasks), Code::kInvalidArgument, Name(ranks() - 1) + " runs something else");
  ExpectGoesOn(&world, empty);
  ExpectGoesOn(&world, Usual());
}

TEST_P(Faults, ALateRankIsWaitedFor) {
  World world(ranks(), 3);
  for (const Task& task : {Usual(), Signed(Task(plan(), 0, 256))}) {
    Outcomes outcomes(ranks());
    StartAllBut(&world, ranks() / 2, task, &outcomes);
    std::this_thread::sleep_for(2 * Communicator::kStall);  // hellos are out
    EXPECT_EQ(outcomes.left(), ranks());
    world.Start(task, ranks() / 2, outcomes.For(ranks() / 2));
    ExpectAll(outcomes.Wait(), Code::kOk, "");
  }
}

// What communicators warn of.
class Warnings {
 public:
  std::function<void(const std::string&)> Collect() {
    return [this](const std::string& warning) {
      std::lock_guard<std::mutex> lock(mutex_);
      all_.push_back(warning);
    };
  }

  std::vector<std::string> With(const std::string& text) const {
    std::vector<std::string> found;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::string& warning : all_) {
      if (warning.find(text) != std::string::npos) found.push_back(warning);
    }
    return found;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> all_;
};

TEST_P(Faults, ALateRankIsNamedOnceByEachThatWaitsForIt) {
  Warnings warnings;
  World world(ranks(), 0, 1, {kPatience, milliseconds(1000), warnings.Collect()});
  for (const Task& task : {Usual(), Signed(Task(plan(), 0, 256))}) {
    const size_t before = warnings.With("").size();
    Outcomes outcomes(ranks());
    const int late = ranks() - 1;
    StartAllBut(&world, late, task, &outcomes);
    while (warnings.With("").size() == before) std::this_thread::sleep_for(milliseconds(20));
    std::this_thread::sleep_for(3 * Watchdog::kInterval);  // nobody says it again
    world.Start(task, late, outcomes.For(late));
    ExpectAll(outcomes.Wait(), Code::kOk, "");
  }
  const auto waited = warnings.With("bucket 'bucket' has waited ");
  EXPECT_LE(waited.size(), 2u * (ranks() - 1));
  for (const std::string& warning : waited) {
    EXPECT_NE(warning.find(" s for " + Name(ranks() - 1) + ": no sign"), std::string::npos)
        << warning;
    EXPECT_EQ(Mentions(warning, "(worker "), 1) << warning;
  }
  EXPECT_EQ(warnings.With("bucket 'bucket' is done after all, after ").size(), waited.size());
  ExpectGoesOn(&world, Usual());
  EXPECT_EQ(warnings.With("").size(), 2 * waited.size());
}

// ------------------------------------------------------------ gone and silent

TEST_P(Faults, ADeadRankIsNamedByAll) {
  for (int dead : {0, ranks() - 1}) {
    World world(ranks(), dead == 0 ? 0 : 3);
    const int late = ranks() - 1;
    ExpectGoesOn(&world, Usual());
    Outcomes outcomes(ranks());
    StartAllBut(&world, late, Usual(), &outcomes);
    world.network().Kill(dead);
    WaitForAllButOne(outcomes);
    world.Start(Usual(), late, outcomes.For(late));
    std::vector<Status> statuses = outcomes.Wait();
    statuses[dead] = statuses[(dead + 1) % ranks()];  // what the dead one thinks does not matter
    ExpectAll(statuses, Code::kUnavailable, Name(dead));

    statuses = world.Run(Usual());
    statuses[dead] = statuses[(dead + 1) % ranks()];
    ExpectAll(statuses, Code::kUnavailable, Name(dead));
  }
}

// The silent rank comes when all have given up, and hears that.
std::vector<Status> EndWithout(World* world, int silent, const Task& task, Outcomes* outcomes) {
  WaitForAllButOne(*outcomes);
  world->Start(task, silent, outcomes->For(silent));
  const std::vector<Status> statuses = outcomes->Wait();
  ExpectAll(statuses, Code::kDeadlineExceeded, "waiting for " + Name(silent) + " [");
  return statuses;
}

TEST_P(Faults, ASilentRankIsNamedByAllAndTheGroupGoesOn) {
  World world(ranks(), 0, 1, {milliseconds(1000)});
  const int silent = ranks() - 1;
  for (const Task& task : {Usual(), Signed(Task(plan(), 0, 256))}) {
    Outcomes others(ranks());
    StartAllBut(&world, silent, task, &others);
    for (const Status& status : EndWithout(&world, silent, task, &others)) {
      EXPECT_EQ(Mentions(status.message(), "no sign of life]"), 1) << status.message();
      EXPECT_EQ(Mentions(status.message(), "(worker "), 1) << status.message();
    }
    ExpectGoesOn(&world, task);
  }
}

// A step has several collectives under way, and ranks that wait may wait in different ones.
TEST_P(Faults, ASilentRankIsNamedByThoseThatWaitElsewhereToo) {
  World world(ranks(), 0, 1, {milliseconds(1000)});
  const int silent = ranks() - 1;
  Task one = Usual(), other = Usual();
  one.name = "one";
  other.name = "other";
  Outcomes outcomes(ranks());
  for (int r = 0; r < silent; ++r) world.Start(r % 2 == 0 ? one : other, r, outcomes.For(r));
  for (const Status& status : EndWithout(&world, silent, one, &outcomes)) {
    EXPECT_EQ(Mentions(status.message(), "(worker "), 1) << status.message();
  }
  ExpectGoesOn(&world, one);
}

TEST_P(Faults, ARankThatHasWaitedAndFallsSilentIsNamed) {
  World world(ranks(), 0, 1, {milliseconds(1000)});
  const int silent = ranks() - 1;
  Outcomes late(ranks());
  world.Start(Usual(), silent, late.For(silent));
  std::this_thread::sleep_for(2 * Communicator::kStall);  // it has given signs of life
  for (int r = 0; r < silent; ++r) world.Start(Usual(), r, late.For(r));
  ExpectAll(late.Wait(), Code::kOk, "");
  Outcomes outcomes(ranks());
  StartAllBut(&world, silent, Usual(), &outcomes);
  EndWithout(&world, silent, Usual(), &outcomes);
}

// ------------------------------------------------------------------- giving up

TEST_P(Faults, OneRankThatGivesUpStopsAllAndTheGroupGoesOn) {
  World world(ranks(), 3);
  for (int round = 0; round < 3; ++round) {
    const int late = ranks() - 1, who = round % late;
    Outcomes outcomes(ranks());
    const auto running = StartAllBut(&world, late, Usual(), &outcomes);
    running[who]->Fail(Status(Code::kCancelled, "cancelled by round " + std::to_string(round)));
    running[who]->Fail(Status(Code::kInternal, "only the first reason counts"));
    WaitForAllButOne(outcomes);
    world.Start(Usual(), late, outcomes.For(late));
    ExpectAll(outcomes.Wait(), Code::kCancelled, "cancelled by round " + std::to_string(round));
    ExpectGoesOn(&world, Usual());
  }
}

TEST_P(Faults, AFailedStepStaysFailed) {
  World world(ranks());
  for (int64_t step : {5, 6}) {
    Task task = Usual();
    task.step = step;
    ExpectGoesOn(&world, task);
    Outcomes outcomes(ranks());
    const auto running = StartAllBut(&world, ranks() - 1, task, &outcomes);
    running[0]->Fail(Status(Code::kCancelled, "enough"));
    WaitForAllButOne(outcomes);
    world.Start(task, ranks() - 1, outcomes.For(ranks() - 1));
    ExpectAll(outcomes.Wait(), Code::kCancelled, "enough");

    task.name = "the next bucket of this step";
    for (int r = 0; r < ranks(); ++r) {
      Outcomes refused(1);
      EXPECT_EQ(world.Start(task, r, refused.For(0)), nullptr);
      EXPECT_EQ(refused.left(), 0);
      ExpectAll(refused.Wait(), Code::kCancelled, "enough");
    }
  }
  ExpectGoesOn(&world, Usual());
}

TEST_P(Faults, AFailureStopsAllCollectivesOfItsRank) {
  World world(ranks(), 3);
  constexpr int kBuckets = 5;
  Outcomes outcomes(kBuckets * ranks());
  std::shared_ptr<Collective> one;
  for (int b = 0; b < kBuckets; ++b) {
    Task task = Usual();
    task.name = "bucket " + std::to_string(b);
    for (int r = 0; r < ranks() - 1; ++r) {
      one = world.Start(task, r, outcomes.For(b * ranks() + r));
    }
  }
  one->Fail(Status(Code::kCancelled, "enough"));
  while (outcomes.left() > kBuckets) std::this_thread::sleep_for(milliseconds(20));
  for (int b = 0; b < kBuckets; ++b) {  // the last learns of it by its first
    Task task = Usual();
    task.name = "bucket " + std::to_string(b);
    task.step = 1;
    world.Start(task, ranks() - 1, outcomes.For(b * ranks() + ranks() - 1));
  }
  ExpectAll(outcomes.Wait(), Code::kCancelled, "enough");
  ExpectGoesOn(&world, Usual());
}

TEST_P(Faults, AFarewellOnDemandStopsAllWhoWaitAndTheGroupGoesOn) {
  World world(ranks(), 3);
  for (int round = 0; round < 3; ++round) {  // at first this rank has never run anything
    const int who = ranks() - 1;
    const std::string reason = "out of memory in step " + std::to_string(round);
    Outcomes outcomes(ranks()), told(1);
    StartAllBut(&world, who, Usual(), &outcomes);
    world.GiveUp(who, reason, told.For(0));
    WaitForAllButOne(outcomes);
    outcomes.For(who)(Status(Code::kCancelled, Name(who) + " gave up: " + reason));
    ExpectAll(outcomes.Wait(), Code::kCancelled, Name(who) + " gave up: " + reason);
    ExpectAll(told.Wait(), Code::kOk, "");
    ExpectGoesOn(&world, Usual());
  }
}

TEST_P(Faults, AFarewellOnDemandStopsWhatOthersStartNext) {
  World world(ranks(), 3);
  for (int who = 0; who < ranks(); ++who) {
    Outcomes outcomes(ranks()), told(1);
    world.GiveUp(who, "no more data", told.For(0));
    StartAllBut(&world, who, Usual(), &outcomes);
    WaitForAllButOne(outcomes);
    outcomes.For(who)(Status(Code::kCancelled, "gave up: no more data"));
    ExpectAll(outcomes.Wait(), Code::kCancelled, "gave up: no more data");
    ExpectAll(told.Wait(), Code::kOk, "");
    ExpectGoesOn(&world, Usual());
  }
}

TEST_P(Faults, CollectivesThatNeedARankWhoseProgramEndsSayHowItEnded) {
  World world(ranks(), 3);
  ExpectGoesOn(&world, Usual());
  const int who = ranks() - 1;
  const std::string exit = Name(who) + " is gone: its program ended with exit code 3";
  for (int round = 0; round < 2; ++round) {  // it has told once, and is needed twice
    Outcomes outcomes(ranks()), told(1);
    if (round == 0) world.AnnounceExit(who, "its program ended with exit code 3", told.For(0));
    if (round == 1) told.For(0)(Status());
    StartAllBut(&world, who, Usual(), &outcomes);
    WaitForAllButOne(outcomes);
    outcomes.For(who)(Status(Code::kUnavailable, exit));
    ExpectAll(outcomes.Wait(), Code::kUnavailable, exit);
    ExpectAll(told.Wait(), Code::kOk, "");
  }
}

TEST(Exits, WhatNeedsNothingMoreOfTheRankGoesOn) {
  World world(4);
  const Task task = Signed(Task(PlanOf("ring_4"), 3000, 256));
  ExpectGoesOn(&world, task);
  Outcomes outcomes(3), told(1);
  world.AnnounceExit(3, "its program ended with exit code 0", told.For(0));
  Task among_others = Signed(Task(PlanOf("ring_3"), 3000, 256));
  for (int r = 0; r < 3; ++r) world.Start(among_others, r, outcomes.For(r));
  ExpectAll(outcomes.Wait(), Code::kOk, "");
}

TEST_P(Faults, WhoGivesUpTakesItsOwnCollectivesAndItsFamilyAlong) {
  World world(ranks(), 3);
  const int sibling = 1;  // of rank 0
  for (int r = 0; r < ranks(); ++r) world.rank(r).JoinFamily(10 * ranks() + 2000 + r / 2);
  for (int round = 0; round < 3; ++round) {
    Outcomes outcomes(ranks()), told(1);
    StartAllBut(&world, sibling, Usual(), &outcomes);
    world.GiveUp(0, "enough", told.For(0));
    WaitForAllButOne(outcomes);
    outcomes.For(sibling)(Status(Code::kCancelled, Name(0) + " gave up: enough"));
    ExpectAll(outcomes.Wait(), Code::kCancelled, Name(0) + " gave up: enough");
    ExpectAll(told.Wait(), Code::kOk, "");
    ExpectGoesOn(&world, Usual());
  }
}

TEST_P(Faults, AllMayGiveUpAtTheSameTime) {
  World world(ranks(), 3);
  for (int round = 0; round < 5; ++round) {
    Outcomes told(ranks());
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks(); ++r) {
      threads.emplace_back([&world, &told, r] { world.GiveUp(r, "enough", told.For(r)); });
    }
    for (auto& thread : threads) thread.join();
    ExpectAll(told.Wait(), Code::kOk, "");
    ExpectGoesOn(&world, Usual());
  }
}

// Some ranks may have finished before another fails: siblings go on together.
TEST_P(Faults, AFamilyGoesOnAfterAFailureAtAnyMoment) {
  World world(ranks(), 3, 17);
  for (int r = 0; r < ranks(); ++r) world.rank(r).JoinFamily(ranks() + 1000);
  for (int round = 0; round < 20; ++round) {
    Outcomes outcomes(ranks());
    const auto running = StartAllBut(&world, -1, Usual(), &outcomes);
    std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    running[round % ranks()]->Fail(Status(Code::kCancelled, "enough"));
    for (const Status& status : outcomes.Wait()) {
      EXPECT_TRUE(status.ok() || Says(status, "enough")) << status.message();
    }
    ExpectGoesOn(&world, Usual());
  }
}

// The executor of a step that fails cancels what runs, and still begins what was on its way.
TEST_P(Faults, AFamilyGoesOnAfterStepsWhoseRanksFailOneByOne) {
  World world(ranks(), 3, 17);
  for (int r = 0; r < ranks(); ++r) world.rank(r).JoinFamily(ranks() + 5000);
  for (int step = 1; step <= 60; ++step) {
    Task before = Usual(), after = Usual();
    before.step = after.step = step;
    after.name = "after";
    Outcomes outcomes(2 * ranks());
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks(); ++r) {
      threads.emplace_back([&, r] {
        const auto fail = [](const std::shared_ptr<Collective>& running) {
          if (running != nullptr) running->Fail(Status(Code::kCancelled, "enough"));
        };
        std::thread canceller(fail, world.Start(before, r, outcomes.For(2 * r)));
        std::this_thread::sleep_for(std::chrono::microseconds((step * (r + 7) * 13) % 100));
        fail(world.Start(after, r, outcomes.For(2 * r + 1)));
        canceller.join();
      });
    }
    for (auto& thread : threads) thread.join();
    for (const Status& status : outcomes.Wait()) {
      EXPECT_TRUE(status.ok() || Says(status, "enough")) << status.message();
    }
    ExpectGoesOn(&world, Usual());
  }
}

// Ranks 1 and 3 of a ring sit between 0 and 2. They have nothing running when they
// hear that rank 0 gave up; rank 2 must hear it all the same, and they must fail
// what they start next, which belongs to the step that failed.
TEST(Idle, NeighboursHideNoFarewellAndFailWhatTheyStartNext) {
  World world(5, 0, 1, {milliseconds(30000)});
  const Task task = Signed(Task(PlanOf("ring_5"), 3000, 256));
  Outcomes stalled(5);
  for (int r = 1; r < 5; ++r) world.Start(task, r, stalled.For(r));
  std::this_thread::sleep_for(2 * Communicator::kStall);  // all of them listen
  world.Start(task, 0, stalled.For(0));
  ExpectAll(stalled.Wait(), Code::kOk, "");

  Outcomes outcomes(5);
  auto first = world.Start(task, 0, outcomes.For(0));
  world.Start(task, 2, outcomes.For(2));
  first->Fail(Status(Code::kInternal, "rank 0 has enough"));
  while (outcomes.left() > 3) std::this_thread::sleep_for(milliseconds(20));
  for (int r : {1, 3, 4}) world.Start(task, r, outcomes.For(r));
  ExpectAll(outcomes.Wait(), Code::kInternal, "rank 0 has enough");
  ExpectGoesOn(&world, task);
}

TEST(Idle, SiblingsWithNothingRunningHaveHeardAFarewell) {
  World world(4);
  for (int r = 0; r < 4; ++r) world.rank(r).JoinFamily(3000);
  Outcomes told(1);
  world.GiveUp(2, "enough", told.For(0));
  EXPECT_EQ(told.left(), 0);
  ExpectGoesOn(&world, Signed(Task(PlanOf("ring_4"), 3000, 256)));
}

TEST(Idle, AFamilyEndsWithItsLastRank) {
  const size_t before = Communicator::FamiliesOfProcess();
  for (int key = 4000; key < 4010; ++key) {
    World world(3);
    for (int r = 0; r < 3; ++r) world.rank(r).JoinFamily(key);
    EXPECT_GT(Communicator::FamiliesOfProcess(), before);
  }
  const auto until = Clock::now() + milliseconds(30000);  // a watchdog may hold a rank for a moment
  while (Communicator::FamiliesOfProcess() > before && Clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(Communicator::FamiliesOfProcess(), before);
}

// Until rank 0 has heard something, or nothing for too long.
Status HeardBy0(World* world) {
  const auto until = Clock::now() + milliseconds(30000);
  Status heard;
  while (heard.ok() && Clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(10));
    heard = world->Watch(0);
  }
  return heard;
}

TEST(Idle, WhoWatchesHearsOfAFarewell) {
  World world(3);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(world.Watch(r).code(), Code::kOk);
  Outcomes told(1);
  world.GiveUp(2, "enough", told.For(0));
  ExpectAll(told.Wait(), Code::kOk, "");
  ExpectAll({HeardBy0(&world)}, Code::kCancelled, Name(2) + " gave up: enough");
}

TEST(Idle, WhoWatchesHearsOfTheDead) {
  World world(3);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(world.Watch(r).code(), Code::kOk);
  world.network().Kill(1);
  ExpectAll({HeardBy0(&world)}, Code::kUnavailable, Name(1) + " is gone");
}

TEST(Exits, WhoWatchesHearsOfThem) {
  World world(3);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(world.Watch(r).code(), Code::kOk);
  Outcomes told(1);
  world.AnnounceExit(1, "its program ended with exit code 3", told.For(0));
  ExpectAll(told.Wait(), Code::kOk, "");
  ExpectAll({HeardBy0(&world)}, Code::kUnavailable,
            Name(1) + " is gone: its program ended with exit code 3");
}

TEST(Idle, WhoGivesUpStaysNoLongerThanItSaid) {
  World world(2);
  Outcomes told(1);
  world.GiveUp(0, "enough", told.For(0), milliseconds(50));  // nobody ever listens
  ExpectAll(told.Wait(), Code::kOk, "");
}

TEST(Admission, OneNameRunsOnceAtATime) {
  const Plan& plan = PlanOf("ring_3");
  World world(plan.ranks);
  const Task task(plan, 1000, 256);
  Outcomes outcomes(plan.ranks), refused(1);
  world.Start(task, 0, outcomes.For(0));
  EXPECT_EQ(world.Start(task, 0, refused.For(0)), nullptr);
  EXPECT_EQ(refused.left(), 0);
  ExpectAll(refused.Wait(), Code::kInvalidArgument, "'bucket' is already running on " + Name(0));
  for (int r = 1; r < plan.ranks; ++r) world.Start(task, r, outcomes.For(r));
  ExpectAll(outcomes.Wait(), Code::kOk, "");
  ExpectGoesOn(&world, task);
}

TEST(Admission, ManyFailuresLeaveNothingBehind) {
  const Plan& plan = PlanOf("ring_3");
  World world(plan.ranks);
  std::weak_ptr<Buffers> last;
  for (int round = 0; round < 20; ++round) {
    auto buffers = std::make_shared<Buffers>();
    buffers->x.resize(4000);
    last = buffers;
    Outcomes outcomes(1);
    const Task task(plan, 1000, 256);
    const auto running = world.Start(task, 0, buffers, outcomes.For(0));
    running->Fail(Status(Code::kCancelled, "enough"));
    ExpectAll(outcomes.Wait(), Code::kCancelled, "enough");
  }
  // The thread that reports lets go of the buffers just after it has reported.
  const auto until = Clock::now() + std::chrono::seconds(20);
  while (!last.expired() && Clock::now() < until) std::this_thread::yield();
  EXPECT_TRUE(last.expired());
}

}  // namespace
}  // namespace tfscale
