// Runs one rank's program over one buffer: the engine itself.
//
// Here moves meet messages: parts begin and end, moves run when they can, and the
// whole ends, well or badly. What a move does to numbers is in reduction.h.
#ifndef TFSCALE_ENGINE_COLLECTIVE_H_
#define TFSCALE_ENGINE_COLLECTIVE_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "custom_ops/engine/agenda.h"
#include "custom_ops/engine/diagnosis.h"
#include "custom_ops/engine/keys.h"
#include "custom_ops/engine/part_memory.h"
#include "custom_ops/engine/progress.h"
#include "custom_ops/engine/reduction.h"
#include "custom_ops/engine/request.h"
#include "custom_ops/engine/residuals.h"
#include "custom_ops/engine/status.h"
#include "custom_ops/engine/transport.h"
#include "custom_ops/engine/watchdog.h"

namespace tfscale {

class Communicator;

class Collective : public std::enable_shared_from_this<Collective> {
 public:
  Collective(Request request, std::shared_ptr<Communicator> communicator, uint32_t generation,
             uint32_t execution, Done done);

  void Start();

  // Called by the communicator when all ranks give up: ends what is under way, and
  // later tells the caller. Report() only if Stop() says that it is still owed.
  bool Stop();
  void Report(const Status& why);

  // Called by the watchdog.
  void CheckProgress(Clock::time_point now);

  const Request& request() const { return request_; }
  uint32_t generation() const { return keys_.generation(); }

  // True while it waits for this rank.
  bool NeedsMessagesOf(int peer) const { return progress_.Needs(peer); }

  // Gives up on behalf of all ranks.
  void Fail(const Status& why);

 private:
  // One run of the whole program over one part of the buffer. Different parts run at
  // the same time.
  struct Part {
    Part(const Request& request, int64_t index, BufferPool* pool)
        : agenda(*request.program), memory(request, index, pool) {}
    Agenda agenda;
    PartMemory memory;
  };
  using PartPtr = std::shared_ptr<Part>;

  void StartEmpty();
  void ActivateNext();
  void PostReceive(const PartPtr& part, int move);
  void Arrived(const PartPtr& part, int move, const Status& status);
  void Run(const PartPtr& part);
  void Execute(Part* part, int move);
  void Send(Part* part, const Move& move);
  void FailBecauseOf(int peer, const Status& status);
  void Closed();
  void Succeed();
  void Record() const;
  void Ask();
  void Introduced(const Status& status);

  const Request request_;
  const std::shared_ptr<Communicator> communicator_;
  const Keys keys_;
  const Clock::time_point began_;
  const int64_t began_at_;  // the same moment, as the wall clock shows it
  const std::shared_ptr<Channel> channel_;
  const Done done_;

  Residuals residuals_;
  const Reduction reduction_;
  Progress progress_;
  Diagnosis diagnosis_;

  std::atomic<int64_t> next_part_{0};
  std::atomic<int> to_activate_{0};
  std::atomic<int64_t> open_;     // parts not finished and messages not taken
  std::atomic<int64_t> sent_{0};  // bytes that peers have taken
  std::atomic<bool> over_{false};
  std::atomic<bool> asked_{false};
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_COLLECTIVE_H_
