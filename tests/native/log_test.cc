// Tests of the log of what ran: true bytes, true times, and no more memory than promised.
#include "custom_ops/engine/log.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "tests/native/world.h"

namespace tfscale {
namespace {

TEST(Log, KeepsTheLastOnesAndTheTotalsOfAll) {
  Log log;
  const int64_t calls = Log::kKept + 10;
  for (int64_t i = 0; i < calls; ++i) log.Record({{i % 2 ? "odd" : "even"}, i, i + 3, 7});
  const auto last = log.Executions();
  ASSERT_EQ(last.size(), Log::kKept);
  EXPECT_EQ(last.front().start, 10);
  EXPECT_EQ(last.front().bucket.label, "even");
  EXPECT_EQ(last.back().end, calls + 2);
  EXPECT_EQ(last.back().bucket.label, "odd");
  const auto totals = log.Totals();
  ASSERT_EQ(totals.size(), 2u);
  EXPECT_EQ(totals.at({"even"}).calls, calls / 2);
  EXPECT_EQ(totals.at({"odd"}).sent, 7 * calls / 2);
  EXPECT_EQ(totals.at({"odd"}).microseconds, 3 * calls / 2);
}

int64_t MicrosecondsNow() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

TEST(Log, CountsTheBytesThatTheNetworkCarried) {
  for (const char* name : {"ring_5", "tree_6", "halving_5", "central_5"}) {
    for (const auto format : {wire::Format::kFp32, wire::Format::kInt8}) {
      const Plan& plan = PlanOf(name);
      World world(plan.ranks, 3);
      const int64_t before = MicrosecondsNow();
      for (const Status& status : world.Run(Task(plan, 30000, 256, format))) {
        EXPECT_TRUE(status.ok()) << status.message();
      }
      const int64_t after = MicrosecondsNow();
      int64_t sent = 0;
      for (int r = 0; r < plan.ranks; ++r) {
        const auto executions = world.rank(r).log().Executions();
        ASSERT_EQ(executions.size(), 1u);
        EXPECT_EQ(executions[0].bucket.label, "bucket");
        EXPECT_LE(before, executions[0].start);
        EXPECT_LE(executions[0].start, executions[0].end);
        EXPECT_LE(executions[0].end, after + 1);
        sent += executions[0].sent;
      }
      EXPECT_EQ(sent, world.traffic().bytes) << name;
      EXPECT_GT(sent, 0);
    }
  }
}

TEST(Log, ARingSendsWhatItShouldAndInt8AQuarterOfIt) {
  const Plan& plan = PlanOf("ring_5");
  World world(plan.ranks);
  const Task exact(plan, 50000, 2000), rounded(plan, 51200, 2048, wire::Format::kInt8);
  world.Run(exact);
  world.Run(rounded);
  for (int r = 0; r < plan.ranks; ++r) {
    const auto executions = world.rank(r).log().Executions();
    ASSERT_EQ(executions.size(), 2u);
    EXPECT_EQ(executions[0].sent, 2 * 4 * 50000 * 4 / 5);
    EXPECT_EQ(executions[1].sent, 2 * 4 * rounded.codec().Bytes(51200) / 5);
    const auto last = world.rank(r).log().Executions(1);
    ASSERT_EQ(last.size(), 1u);
    EXPECT_EQ(last[0].sent, executions[1].sent);
  }
}

TEST(Log, WhatFailsIsKeptTooWithWhatWasTaken) {
  const Plan& plan = PlanOf("ring_5");
  World world(plan.ranks);
  Outcomes outcomes(1);
  world.Start(Task(plan, 1000, 256), 0, outcomes.For(0))->Fail(Status(Code::kCancelled, "enough"));
  outcomes.Wait();
  const auto executions = world.rank(0).log().Executions();
  ASSERT_EQ(executions.size(), 1u);
  EXPECT_EQ(executions[0].sent, 0);
  EXPECT_EQ(world.rank(0).log().Totals().at({"bucket"}).calls, 1);
}

}  // namespace
}  // namespace tfscale
