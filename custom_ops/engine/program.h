// One rank's part of a schedule, checked and ready to run.
#ifndef TFSCALE_ENGINE_PROGRAM_H_
#define TFSCALE_ENGINE_PROGRAM_H_

#include <cstdint>
#include <vector>

#include "custom_ops/engine/status.h"

namespace tfscale {

// The numbers are shared with tfscale/collectives/schedule.py.
enum class Kind : int { kSend = 0, kAdd = 1, kFinalise = 2, kKeep = 3 };

struct Move {
  Kind kind;
  int peer;         // -1 for kFinalise
  int first, last;  // the chunks [first, last)
  bool final;       // the chunks are final: their owner's bytes travel

  bool receives() const { return kind == Kind::kAdd || kind == Kind::kKeep; }
};

// What a program is for decides what each rank brings and what it leaves with.
// In a route each chunk goes from one rank to one other, or stays, and a rank has no part in most.
// In a mixture each rank sends what it brings, and nothing else, to some others, and leaves with
// its own and what came: `x` is read by peers while `y` is written, so they are not the same
// memory.
enum class Goal { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kMixture, kRoute };

struct Program {
  int rank = 0;
  int ranks = 1;
  int chunks = 1;
  Goal goal = Goal::kAllReduce;
  std::vector<Move> moves;
  std::vector<int> waits_for;             // how many earlier moves must be done
  std::vector<std::vector<int>> unlocks;  // which later moves wait for this one
  std::vector<int> peers;                 // all ranks that this rank talks to

  // Of a route: the chunks in x and those in y, each in the order in which they lie there.
  std::vector<int> brings, gets;

  // More than any schedule needs; what is kept for each chunk stays small.
  static constexpr int kMostChunks = 1 << 20;

  // `flat` holds four numbers a move: kind, peer, first, last. Refuses whatever
  // could make the engine touch memory wrongly, lose a contribution of this
  // rank or encode a chunk twice. That all ranks fit together is proven in
  // Python (tfscale/collectives/verify.py).
  static Status Parse(const std::vector<int>& flat, Goal goal, int rank, int ranks, int chunks,
                      Program* program);

  // Says where the chunks of a route lie. Refuses places that do not fit the moves.
  Status Place(const std::vector<int>& in_x, const std::vector<int>& in_y);
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_PROGRAM_H_
