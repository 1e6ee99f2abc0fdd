// What a collective still waits for, of whom, and since when.
#ifndef TFSCALE_ENGINE_PROGRESS_H_
#define TFSCALE_ENGINE_PROGRESS_H_

#include <atomic>
#include <utility>
#include <vector>

#include "custom_ops/engine/watchdog.h"

namespace tfscale {

class Progress {
 public:
  // `company`: the ranks that it exchanges anything with. `of_all`: it needs every one of
  // them until it ends, whatever is awaited.
  Progress(int ranks, std::vector<int> company, bool of_all)
      : company_(std::move(company)), of_all_(of_all), awaited_(ranks), untaken_(ranks) {}

  void Awaits(int peer) { ++awaited_[peer]; }
  void Came(int peer) { --awaited_[peer]; }
  void Offered(int peer) { ++untaken_[peer]; }
  void Answered(int peer) { --untaken_[peer]; }  // taken, or never will be
  void Made() { last_ = Clock::now().time_since_epoch().count(); }

  Clock::time_point last() const { return Clock::time_point(Clock::duration(last_.load())); }
  int awaited(int peer) const { return awaited_[peer]; }
  int untaken(int peer) const { return untaken_[peer]; }

  const std::vector<int>& company() const { return company_; }
  bool Needs(int peer) const { return awaited_[peer] > 0 || untaken_[peer] > 0 || of_all_; }

 private:
  const std::vector<int> company_;
  const bool of_all_;
  std::atomic<Clock::rep> last_{Clock::now().time_since_epoch().count()};
  std::vector<std::atomic<int>> awaited_, untaken_;  // messages, per peer
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_PROGRESS_H_
