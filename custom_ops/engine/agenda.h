// Which moves of a program may run when, on one part of the buffer.
#ifndef TFSCALE_ENGINE_AGENDA_H_
#define TFSCALE_ENGINE_AGENDA_H_

#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include "custom_ops/engine/program.h"

namespace tfscale {

// A move may run once the moves before it are done and its message is here. Moves
// run one at a time, on whichever thread brought what they waited for.
class Agenda {
 public:
  // Until the first Run() nothing runs, whatever arrives.
  explicit Agenda(const Program& program);

  // The move's message is here. True if it is now the caller's task to Run().
  bool Arrived(int move);

  // Runs the moves that are ready and those that they make ready, unless it is over. True
  // if that was the last.
  template <typename Execute>
  bool Run(const std::atomic<bool>& over, const Execute& execute) {
    std::unique_lock<std::mutex> lock(mutex_);
    bool finished = moves_left_ == 0;
    for (size_t next = 0; !over && next < ready_.size(); ++next) {
      const int move = ready_[next];
      lock.unlock();
      execute(move);
      lock.lock();
      for (int later : program_.unlocks[move]) {
        if (--missing_[later] == 0) ready_.push_back(later);
      }
      finished = --moves_left_ == 0;
    }
    ready_.clear();
    running_ = false;
    return finished;
  }

 private:
  const Program& program_;
  std::mutex mutex_;
  bool running_ = true;
  std::vector<int> missing_;  // per move: what it still waits for
  std::vector<int> ready_;
  size_t moves_left_;
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_AGENDA_H_
