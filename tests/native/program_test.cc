// Tests of what the engine is made of: programs, layouts, and the buffer pool.
#include "custom_ops/engine/program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/engine/layout.h"
#include "tests/native/programs.h"

namespace tfscale {
namespace {

// ------------------------------------------------------------------- programs

constexpr int kSend = 0, kAdd = 1, kFinalise = 2, kKeep = 3;
using Flat = std::vector<std::vector<int>>;  // one move each

std::vector<int> Joined(const Flat& moves) {
  std::vector<int> flat;
  for (const auto& move : moves) flat.insert(flat.end(), move.begin(), move.end());
  return flat;
}

struct Wrong {
  std::string why;
  Goal goal;
  Flat moves;  // of rank 1 of 3, with 2 chunks
  std::string message;
};

const Wrong kWrong[] = {
    {"unknown kind", Goal::kAllReduce, {{4, 0, 0, 2}}, "move 0: no move has kind 4"},
    {"negative kind", Goal::kAllReduce, {{-1, 0, 0, 2}}, "move 0: no move has kind -1"},
    {"finalise with a peer",
     Goal::kAllReduce,
     {{kFinalise, 7, 0, 2}},
     "move 0: finalise has no peer"},
    {"peer below", Goal::kAllReduce, {{kAdd, -1, 0, 2}}, "move 0: no peer has rank -1"},
    {"peer above", Goal::kAllReduce, {{kAdd, 3, 0, 2}}, "move 0: no peer has rank 3"},
    {"peer is itself", Goal::kAllReduce, {{kAdd, 1, 0, 2}}, "move 0: no peer has rank 1"},
    {"chunk below", Goal::kAllReduce, {{kAdd, 0, -1, 2}}, "chunks [-1, 2) are not within the 2"},
    {"chunk above", Goal::kAllReduce, {{kAdd, 0, 0, 3}}, "chunks [0, 3) are not within the 2"},
    {"no chunk", Goal::kAllReduce, {{kAdd, 0, 1, 1}}, "chunks [1, 1) are not within the 2"},
    {"backward chunks", Goal::kAllReduce, {{kAdd, 0, 2, 1}}, "chunks [2, 1) are not within the 2"},
    {"given twice",
     Goal::kAllReduce,
     {{kSend, 0, 0, 2}, {kSend, 2, 0, 2}},
     "move 1: cannot send chunk 0, which is given away"},
    {"added after it was given",
     Goal::kAllReduce,
     {{kSend, 0, 0, 2}, {kAdd, 2, 0, 2}},
     "move 1: cannot add chunk 0, which is given away"},
    {"finalised after it was given",
     Goal::kAllReduce,
     {{kSend, 0, 0, 2}, {kFinalise, -1, 0, 2}},
     "move 1: cannot finalise chunk 0, which is given away"},
    {"finalised twice",
     Goal::kAllReduce,
     {{kFinalise, -1, 0, 2}, {kFinalise, -1, 1, 2}},
     "move 1: cannot finalise chunk 1, which is final"},
    {"added after it was final",
     Goal::kAllReduce,
     {{kFinalise, -1, 0, 2}, {kAdd, 0, 1, 2}},
     "move 1: cannot add chunk 1, which is final"},
    {"kept before it was given",
     Goal::kAllReduce,
     {{kKeep, 0, 0, 2}},
     "move 0: cannot keep chunk 0, which is a partial sum"},
    {"kept twice",
     Goal::kAllReduce,
     {{kSend, 0, 0, 2}, {kKeep, 0, 0, 2}, {kKeep, 2, 0, 1}},
     "move 2: cannot keep chunk 0, which is final"},
    {"final and partial in one message",
     Goal::kAllReduce,
     {{kFinalise, -1, 0, 1}, {kSend, 0, 0, 2}},
     "move 1: its chunks are partly final and partly a partial sum"},
    {"given and partial in one message",
     Goal::kAllReduce,
     {{kSend, 0, 1, 2}, {kSend, 2, 0, 2}},
     "move 1: its chunks are partly a partial sum and partly given away"},
    {"ends as a partial sum",
     Goal::kAllReduce,
     {{kFinalise, -1, 0, 1}},
     "move 1: chunk 1 ends as a partial sum"},
    {"ends as given away",
     Goal::kAllReduce,
     {{kFinalise, -1, 0, 1}, {kSend, 0, 1, 2}},
     "move 2: chunk 1 ends as given away"},
    {"nothing at all", Goal::kReduceScatter, {}, "move 0: chunk 0 ends as a partial sum"},
    {"a gather that adds", Goal::kAllGather, {{kAdd, 0, 0, 2}}, "move 0: cannot add chunk 0"},
    {"a gather that gives its sum away",
     Goal::kAllGather,
     {{kSend, 0, 0, 1}},
     "move 0: cannot send chunk 0, which is a partial sum"},
    {"a mixture that sends what came",
     Goal::kMixture,
     {{kAdd, 0, 0, 2}, {kSend, 2, 0, 2}},
     "move 1: cannot send chunk 0, which is mixed with what others gave"},
    {"a mixture that sends its result",
     Goal::kMixture,
     {{kFinalise, -1, 0, 2}, {kSend, 2, 0, 2}},
     "move 1: cannot send chunk 0, which is final"},
    {"a mixture that adds to its result",
     Goal::kMixture,
     {{kFinalise, -1, 0, 2}, {kAdd, 2, 0, 2}},
     "move 1: cannot add chunk 0, which is final"},
    {"a mixture that keeps", Goal::kMixture, {{kKeep, 0, 0, 2}}, "move 0: cannot keep chunk 0"},
    {"a mixture that ends without",
     Goal::kMixture,
     {{kSend, 0, 0, 2}, {kAdd, 0, 0, 2}},
     "move 2: chunk 0 ends as mixed with what others gave"},
    {"a route that adds", Goal::kRoute, {{kAdd, 0, 0, 2}}, "move 0: cannot add chunk 0"},
    {"a route that sends what it has not",
     Goal::kRoute,
     {{kSend, 0, 0, 1}},
     "move 0: cannot send chunk 0, which is a partial sum"},
    {"a route that keeps twice",
     Goal::kRoute,
     {{kKeep, 0, 0, 1}, {kKeep, 2, 0, 1}},
     "move 1: cannot keep chunk 0, which is final"},
    {"a broadcast that ends without",
     Goal::kBroadcast,
     {{kKeep, 0, 0, 1}},
     "move 1: chunk 1 ends as a partial sum"},
};

TEST(Program, RefusesWhatIsWrongAndSaysWhere) {
  for (const Wrong& wrong : kWrong) {
    Program program;
    const Status status = Program::Parse(Joined(wrong.moves), wrong.goal, 1, 3, 2, &program);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << wrong.why;
    EXPECT_NE(status.message().find(wrong.message), std::string::npos)
        << wrong.why << ": " << status.message();
    EXPECT_NE(status.message().find("the program of rank 1 "), std::string::npos) << wrong.why;
  }
}

struct WrongPlaces {
  std::string why;
  std::vector<int> in_x, in_y;
  std::string message;
};

const WrongPlaces kWrongPlaces[] = {
    {"chunk below", {-1, 0}, {2}, "places chunk -1 twice or it is none of the 3 chunks"},
    {"chunk above", {1, 0}, {3}, "places chunk 3 twice or it is none of the 3 chunks"},
    {"twice in x", {0, 1, 0}, {2}, "places chunk 0 twice"},
    {"twice in y", {0, 1}, {2, 2}, "places chunk 2 twice"},
    {"read where there is nothing",
     {1},
     {2},
     "chunk 0 is finalised and not kept, and it lies not in x"},
    {"written where there is nothing",
     {0, 1},
     {},
     "chunk 2 is not finalised and kept, and it lies not in x"},
    {"kept in x", {0, 1, 2}, {2}, "chunk 2 is not finalised and kept, and it lies in x and in y"},
    {"never written",
     {0},
     {1, 2},
     "chunk 1 is finalised and not kept, and it lies not in x and in y"},
};

TEST(Program, RefusesPlacesThatDoNotFitItsMoves) {
  const Flat moves = {{kFinalise, -1, 0, 2}, {kSend, 0, 0, 1}, {kKeep, 2, 2, 3}};
  for (const WrongPlaces& wrong : kWrongPlaces) {
    Program program;
    ASSERT_TRUE(Program::Parse(Joined(moves), Goal::kRoute, 1, 3, 3, &program).ok());
    const Status status = program.Place(wrong.in_x, wrong.in_y);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << wrong.why;
    EXPECT_NE(status.message().find(wrong.message), std::string::npos)
        << wrong.why << ": " << status.message();
  }
  Program program;
  ASSERT_TRUE(Program::Parse(Joined(moves), Goal::kRoute, 1, 3, 3, &program).ok());
  EXPECT_TRUE(program.Place({1, 0}, {2, 1}).ok());
}

TEST(Layout, OfARouteKeepsPlacesInXAndInYApart) {
  // Chunks 3, 0 and 1 lie in x, 1 and 2 in y; chunk 1 stays, 0 is empty, 4 is none of this rank's.
  const Layout layout = Layout::Routed(5, {3, 0, 1}, {40, 0, 7}, {2, 1}, {20, 7}, 16, 16);
  EXPECT_EQ(layout.parts(), 3);  // of the largest
  EXPECT_EQ(layout.count(), 47 + 27);
  const std::map<int, int64_t> sizes = {{0, 0}, {1, 7}, {2, 20}, {3, 40}, {4, 0}};
  for (const auto& [chunk, size] : sizes) {
    int64_t count = 0;
    for (int64_t part = 0; part < layout.parts(); ++part) {
      const Span piece = layout.piece(part, chunk);
      EXPECT_EQ(piece.count, layout.in_y(part, chunk).count);
      if (piece.count > 0) {
        EXPECT_EQ(piece.first, (chunk == 1 ? 40 : 0) + count);
      }
      count += piece.count;
    }
    EXPECT_EQ(count, size) << chunk;
  }
  EXPECT_EQ(layout.in_y(1, 2).first, 16);
  EXPECT_EQ(layout.in_y(0, 1).first, 20);
  EXPECT_TRUE(layout.is_in_y(1) && layout.is_in_y(2));
  EXPECT_FALSE(layout.is_in_y(0) || layout.is_in_y(3) || layout.is_in_y(4));
}

TEST(Program, RefusesAFrameThatMakesNoSense) {
  struct Frame {
    std::vector<int> flat;
    int rank, ranks, chunks;
  };
  const Frame frames[] = {{{kFinalise, -1, 0}, 0, 1, 1},
                          {{kFinalise, -1, 0, 1}, -1, 1, 1},
                          {{kFinalise, -1, 0, 1}, 1, 1, 1},
                          {{kFinalise, -1, 0, 1}, 0, 0, 1},
                          {{kFinalise, -1, 0, 1 << 30}, 0, 1, 1 << 30},
                          {{}, 0, 1, 0},
                          {{}, 0, 1, -1}};
  for (const Frame& frame : frames) {
    Program program;
    EXPECT_EQ(Program::Parse(frame.flat, Goal::kAllReduce, frame.rank, frame.ranks, frame.chunks,
                             &program)
                  .code(),
              Code::kInvalidArgument);
  }
}

// Any move left out breaks the program itself or, if only another rank can
// tell, is a final value that nobody sends on.
TEST(Program, MissesEveryStepButAFinalSend) {
  for (const Plan& plan : PlansFor(Goal::kAllReduce, 6)) {
    for (int rank = 0; rank < plan.ranks; ++rank) {
      const auto& moves = plan.programs[rank]->moves;
      for (size_t s = 0; s < moves.size(); ++s) {
        if (moves[s].kind == Kind::kAdd || (moves[s].kind == Kind::kSend && moves[s].final))
          continue;
        std::vector<int> flat = plan.flat[rank];
        flat.erase(flat.begin() + 4 * s, flat.begin() + 4 * s + 4);
        Program program;
        EXPECT_FALSE(Program::Parse(flat, plan.goal, rank, plan.ranks, plan.chunks, &program).ok())
            << plan.name << " without move " << s << " of rank " << rank;
      }
    }
  }
}

TEST(Program, LinksEachStepToTheLastOnesOnItsChunks) {
  const Flat moves = {{kSend, 0, 0, 1}, {kAdd, 0, 1, 2},  {kFinalise, -1, 1, 2},
                      {kKeep, 2, 0, 1}, {kSend, 2, 0, 2}, {kSend, 0, 1, 2}};
  Program program;
  const Status status = Program::Parse(Joined(moves), Goal::kAllReduce, 1, 3, 2, &program);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(program.waits_for, (std::vector<int>{0, 0, 1, 1, 2, 1}));
  EXPECT_EQ(program.unlocks, (std::vector<std::vector<int>>{{3}, {2}, {4}, {4}, {5}, {}}));
  EXPECT_EQ(program.peers, (std::vector<int>{0, 2}));
  const std::vector<bool> final = {false, false, false, true, true, true};
  for (size_t s = 0; s < final.size(); ++s) EXPECT_EQ(program.moves[s].final, final[s]) << s;
}

TEST(Program, MayEndWithoutWhatOthersOwnOnlyInAReduceScatter) {
  const std::vector<int> flat = Joined({{kSend, 0, 0, 1}, {kAdd, 0, 1, 2}, {kFinalise, -1, 1, 2}});
  Program program;
  EXPECT_TRUE(Program::Parse(flat, Goal::kReduceScatter, 1, 2, 2, &program).ok());
  EXPECT_FALSE(Program::Parse(flat, Goal::kAllReduce, 1, 2, 2, &program).ok());
}

// -------------------------------------------------------------------- layouts

constexpr int64_t kCounts[] = {0, 1, 15, 16, 17, 255, 256, 257, 5000, 70001};
constexpr int kChunks[] = {1, 2, 3, 7, 32};
constexpr int64_t kPieces[] = {1, 16, 256, 1000, 100000};
constexpr int64_t kUnits[] = {1, 16, 256};

// Every number is in one piece, and pieces start at multiples of the unit from
// the start of the buffer or shard.
void ExpectPartition(const Layout& layout, int64_t count, int64_t shard, int64_t piece,
                     int64_t unit) {
  std::vector<int> covered(count, 0);
  for (int64_t part = 0; part < layout.parts(); ++part) {
    int64_t in_part = 0;
    for (int c = 0; c < layout.chunks(); ++c) {
      const Span span = layout.piece(part, c);
      ASSERT_GE(span.count, 0);
      ASSERT_LE(span.count, (std::max(piece, unit) + unit - 1) / unit * unit);
      ASSERT_GE(span.first, 0);
      ASSERT_LE(span.first + span.count, count);
      ASSERT_TRUE(span.count == 0 || span.first % shard % unit == 0);
      for (int64_t i = 0; i < span.count; ++i) ++covered[span.first + i];
      in_part += span.count;
    }
    ASSERT_TRUE(in_part > 0 || count == 0) << "part " << part << " is empty";
  }
  ASSERT_TRUE(std::all_of(covered.begin(), covered.end(), [](int n) { return n == 1; }));
}

template <typename Try>
void ForAllLayouts(Try attempt) {
  for (int64_t count : kCounts) {
    for (int chunks : kChunks) {
      for (int64_t piece : kPieces) {
        for (int64_t unit : kUnits) {
          SCOPED_TRACE(testing::Message() << count << " numbers, " << chunks
                                          << " chunks, pieces of " << piece << ", unit " << unit);
          attempt(count, chunks, piece, unit);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Layout, JoinedPiecesCoverTheBuffer) {
  ForAllLayouts([](int64_t count, int chunks, int64_t piece, int64_t unit) {
    const Layout layout = Layout::Joined(count, chunks, piece, unit);
    EXPECT_EQ(layout.count(), count);
    ExpectPartition(layout, count, std::max<int64_t>(1, count), piece, unit);
  });
}

TEST(Layout, JoinedChunksOfAPartAreNeighbours) {
  ForAllLayouts([](int64_t count, int chunks, int64_t piece, int64_t unit) {
    const Layout layout = Layout::Joined(count, chunks, piece, unit);
    int64_t next = 0;
    for (int64_t part = 0; part < layout.parts(); ++part) {
      for (int c = 0; c < chunks; ++c) {
        ASSERT_EQ(layout.piece(part, c).first, next);
        next += layout.piece(part, c).count;
      }
    }
  });
}

TEST(Layout, ShardedPiecesCoverEachShard) {
  ForAllLayouts([](int64_t shard, int chunks, int64_t piece, int64_t unit) {
    const Layout layout = Layout::Sharded(shard, chunks, piece, unit);
    EXPECT_EQ(layout.count(), shard * chunks);
    ExpectPartition(layout, shard * chunks, std::max<int64_t>(1, shard), piece, unit);
    for (int64_t part = 0; part < layout.parts(); ++part) {
      for (int c = 0; c < chunks; ++c) {
        const Span span = layout.piece(part, c);
        ASSERT_GE(span.first, c * shard);
        ASSERT_LE(span.first + span.count, (c + 1) * shard);
      }
    }
  });
}

// ---------------------------------------------------------------- buffer pool

TEST(BufferPool, GivesTheSameMemoryAgain) {
  auto pool = std::make_shared<BufferPool>();
  uint8_t* first = nullptr;
  for (int i = 0; i < 3; ++i) {
    const View view = pool->Get(5000);
    EXPECT_EQ(view.size, 5000u);
    if (first == nullptr) first = view.data;
    EXPECT_EQ(view.data, first);
  }
}

TEST(BufferPool, GivesEachUserMemoryOfItsOwn) {
  auto pool = std::make_shared<BufferPool>();
  std::vector<View> views;
  for (size_t size : {0, 1, 1000, 1024, 1025, 5000, 5000, 100000}) {
    views.push_back(pool->Get(size));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(views.back().data) % 64, 0u);
    std::fill_n(views.back().data, size, static_cast<uint8_t>(views.size()));
  }
  for (size_t i = 0; i < views.size(); ++i) {
    EXPECT_EQ(std::count(views[i].data, views[i].data + views[i].size, i + 1),
              static_cast<int64_t>(views[i].size));
  }
}

TEST(BufferPool, KeepsNoMoreThanItMay) {
  auto pool = std::make_shared<BufferPool>(0);
  uint8_t* data = pool->Get(5000).data;
  EXPECT_NE(data, nullptr);  // and it is freed, as AddressSanitizer sees
}

TEST(BufferPool, LivesAsLongAsItsBuffers) {
  auto pool = std::make_shared<BufferPool>();
  View view = pool->Get(100);
  std::weak_ptr<BufferPool> weak = pool;
  pool.reset();
  std::fill_n(view.data, view.size, uint8_t{1});
  EXPECT_FALSE(weak.expired());
  view = View();
  EXPECT_TRUE(weak.expired());
}

TEST(BufferPool, ServesManyThreads) {
  auto pool = std::make_shared<BufferPool>(10000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([pool, t] {
      for (size_t i = 0; i < 500; ++i) {
        const View view = pool->Get(i * 7 % 4000 + 1);
        view.data[0] = static_cast<uint8_t>(t);
        EXPECT_EQ(view.data[0], t);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace tfscale
