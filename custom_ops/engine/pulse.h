// Signs of life between ranks that wait.
//
// A rank that waits in one collective looks dead to those that wait for it in
// another. So whoever stalls, in whatever collective, gives all ranks a beat and takes
// theirs, again and again while it lasts: whose last beat is recent waits itself.
//
// The n-th beat between two ranks is offered when the one before has been taken. An
// offer may outlive the stall it belongs to, so a rank that has gone on may be heard
// once more, and no more than that.
#ifndef TFSCALE_ENGINE_PULSE_H_
#define TFSCALE_ENGINE_PULSE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/engine/transport.h"
#include "custom_ops/engine/watchdog.h"

namespace tfscale {

// Of one rank, in one generation.
class Pulse : public std::enable_shared_from_this<Pulse> {
 public:
  Pulse(std::vector<int> others, uint32_t generation, Clock::duration interval,
        std::shared_ptr<Channel> channel, const std::shared_ptr<BufferPool>& pool);

  // Called again and again while this rank waits, by one thread.
  void Beat(Clock::time_point now);
  bool HeardSince(int peer, Clock::time_point since) const;
  void Cancel() { channel_->Cancel(); }

 private:
  struct Peer {
    std::atomic<bool> offered{false}, asked{false};
    std::atomic<uint32_t> given{0}, taken{0};
    std::atomic<Clock::rep> heard_at{Clock::time_point::min().time_since_epoch().count()};
  };

  void Offer(int to);
  void Ask(int from);
  Key KeyOf(uint32_t number) const { return {0, generation_, number, 0, kPulseMessage, 0, 0}; }

  const std::vector<int> others_;
  const uint32_t generation_;
  const Clock::duration interval_;
  const std::shared_ptr<Channel> channel_;
  const std::shared_ptr<BufferPool> pool_;
  const View beat_;
  std::vector<Peer> peers_;  // by rank
  Clock::time_point next_ = Clock::time_point::min();
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_PULSE_H_
