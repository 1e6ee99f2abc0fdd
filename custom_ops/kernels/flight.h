// An exchange that was begun in one step of TensorFlow's and whose result is taken in another one.
#ifndef TFSCALE_KERNELS_FLIGHT_H_
#define TFSCALE_KERNELS_FLIGHT_H_

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfscale {

// One exchange after the other. Each is over at the latest when its ranks' deadline is, whether
// anybody takes its result or not.
class Flight : public tensorflow::ResourceBase {
 public:
  // What came of it. An exchange that failed has no numbers.
  struct Result {
    absl::Status status;
    tensorflow::Tensor y, lost;
    double took = 0;  // seconds
  };

  // Calls `then` as soon as nothing is under way.
  void WhenOver(std::function<void()> then) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (under_way_) return waiting_.push_back(std::move(then));
    }
    then();
  }

  // An exchange begins, though nobody may have taken the last one's result. `cancel` ends it.
  void Depart(std::function<void()> cancel) {
    std::lock_guard<std::mutex> lock(mutex_);
    under_way_ = holds_ = true;
    cancel_ = std::move(cancel);
    result_ = Result();
    began_ = Clock::now();
  }

  // It is over.
  void Arrive(absl::Status status, const tensorflow::Tensor& y, const tensorflow::Tensor& lost) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      under_way_ = false;
      cancel_ = nullptr;
      result_.took = std::chrono::duration<double>(Clock::now() - began_).count();
      if (status.ok()) {
        result_.y = y;
        result_.lost = lost;
      }
      result_.status = std::move(status);
    }
    while (std::function<void()> then = NextInLine()) then();
  }

  // Ends on all ranks what is under way.
  void Cancel() {
    std::function<void()> cancel;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      cancel = cancel_;
    }
    if (cancel != nullptr) cancel();
  }

  // Whether there is anything to take, now or when it is over.
  bool holds() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return holds_;
  }

  Result Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    holds_ = false;
    return std::exchange(result_, Result());
  }

  std::string DebugString() const override { return "an exchange behind steps"; }

 private:
  using Clock = std::chrono::steady_clock;

  // Who waits, one at a time: what it does may begin another exchange, for which the others wait.
  std::function<void()> NextInLine() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (under_way_ || waiting_.empty()) return nullptr;
    std::function<void()> then = std::move(waiting_.front());
    waiting_.pop_front();
    return then;
  }

  mutable std::mutex mutex_;
  bool under_way_ = false, holds_ = false;
  std::function<void()> cancel_;
  std::deque<std::function<void()>> waiting_;
  Result result_;
  Clock::time_point began_;
};

inline std::shared_ptr<Flight> Shared(tensorflow::core::RefCountPtr<Flight> flight) {
  return {flight.release(), [](Flight* held) { held->Unref(); }};
}

}  // namespace tfscale

#endif  // TFSCALE_KERNELS_FLIGHT_H_
