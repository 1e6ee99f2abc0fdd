// An exchange that was begun in one step of TensorFlow's and whose result is taken in another one.
#ifndef TFSCALE_KERNELS_FLIGHT_H_
#define TFSCALE_KERNELS_FLIGHT_H_

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfscale {

// One exchange after the other. Each is over at the latest when its ranks' deadline is, whether
// anybody takes its result or not. A flight holds the results of the last `most` exchanges.
class Flight : public tensorflow::ResourceBase {
 public:
  // What came of it. An exchange that failed has no numbers.
  struct Result {
    absl::Status status;
    tensorflow::Tensor y, lost;
    double took = 0;  // seconds
  };

  // Of one exchange, from the moment at which it is booked.
  struct Exchange {
    std::function<void(const std::shared_ptr<Exchange>&)> start;
    std::function<void()> cancel;  // while it is under way
    std::function<void()> taker;   // waits for its result
    bool is_over = false, is_cancelled = false;
    std::chrono::steady_clock::time_point began;
    Result result;
  };
  using ExchangePtr = std::shared_ptr<Exchange>;

  explicit Flight(int most) : most_(most) {}

  // Starts an exchange as soon as those before it are over, and calls `done` as soon as there is
  // room for its result: the oldest one, which nobody has taken, gives way. What need not wait is
  // started before `done` is called: a rank that gives up after that ends it.
  void Book(std::function<void(const ExchangePtr&)> start, std::function<void()> done) {
    auto exchange = std::make_shared<Exchange>();
    exchange->start = std::move(start);
    exchange->began = Clock::now();
    Run([&] { bookings_.emplace_back(std::move(exchange), std::move(done)); });
  }

  // It can be cancelled from now on; false if that has been done already.
  bool Depart(const ExchangePtr& exchange, std::function<void()> cancel) {
    std::lock_guard<std::mutex> lock(mutex_);
    exchange->cancel = std::move(cancel);
    return !exchange->is_cancelled;
  }

  // It is over.
  void Arrive(const ExchangePtr& exchange, absl::Status status, const tensorflow::Tensor& y,
              const tensorflow::Tensor& lost) {
    Run([&] {
      Result& result = exchange->result;
      result.took = std::chrono::duration<double>(Clock::now() - exchange->began).count();
      if (status.ok()) {
        result.y = y;
        result.lost = lost;
      }
      result.status = std::move(status);
      exchange->is_over = true;
      exchange->cancel = nullptr;
      under_way_ = nullptr;
      if (exchange->taker != nullptr) ready_.push_back(std::move(exchange->taker));
    });
  }

  // Takes the oldest exchange that nobody has taken; null if there is none.
  ExchangePtr Take() {
    ExchangePtr taken;
    Run([&] {
      if (held_.empty()) return;
      taken = std::move(held_.front());
      held_.pop_front();
    });
    return taken;
  }

  // Calls `then` as soon as an exchange is over.
  void WhenOver(const ExchangePtr& exchange, std::function<void()> then) {
    Run([&] {
      if (exchange->is_over) {
        ready_.push_back(std::move(then));
      } else {
        exchange->taker = std::move(then);
      }
    });
  }

  // Forgets all results that nobody has taken; their exchanges go on.
  void Drop() {
    Run([&] { held_.clear(); });
  }

  // Ends this exchange on all ranks, and those before it.
  void Cancel(const ExchangePtr& last) {
    std::function<void()> cancel;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (last->is_over) return;
      const auto end = std::find(line_.begin(), line_.end(), last);
      std::for_each(line_.begin(), end, [](const ExchangePtr& each) { each->is_cancelled = true; });
      last->is_cancelled = true;
      if (under_way_ != nullptr) {
        under_way_->is_cancelled = true;
        cancel = under_way_->cancel;
      }
    }
    if (cancel != nullptr) cancel();
  }

  // How many results can be taken, and how many of these, from the oldest on, are there already.
  std::pair<int, int> Counts() const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto there = std::find_if_not(held_.begin(), held_.end(),
                                        [](const ExchangePtr& each) { return each->is_over; });
    return {static_cast<int>(held_.size()), static_cast<int>(there - held_.begin())};
  }

  std::string DebugString() const override { return "exchanges behind steps"; }

 private:
  using Clock = std::chrono::steady_clock;

  // Changes the state, and then does what has become possible.
  void Run(const std::function<void()>& change) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      change();
      Advance();
    }
    while (std::function<void()> next = Next()) next();
  }

  void Advance() {
    std::deque<std::function<void()>> booked;
    while (!bookings_.empty() && MakeRoom()) {
      auto& [exchange, done] = bookings_.front();
      held_.push_back(exchange);
      line_.push_back(std::move(exchange));
      booked.push_back(std::move(done));
      bookings_.pop_front();
    }
    StartNext();
    std::move(booked.begin(), booked.end(), std::back_inserter(ready_));
  }

  void StartNext() {
    if (under_way_ != nullptr || line_.empty()) return;
    under_way_ = std::move(line_.front());
    line_.pop_front();
    ready_.push_back(
        [exchange = under_way_] { std::exchange(exchange->start, nullptr)(exchange); });
  }

  bool MakeRoom() {
    if (static_cast<int>(held_.size()) < most_) return true;
    if (!held_.front()->is_over) return false;
    held_.pop_front();
    return true;
  }

  // One at a time, and without the lock: what it does may change the state again.
  std::function<void()> Next() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_.empty()) return nullptr;
    std::function<void()> next = std::move(ready_.front());
    ready_.pop_front();
    return next;
  }

  const int most_;
  mutable std::mutex mutex_;
  std::deque<std::pair<ExchangePtr, std::function<void()>>> bookings_;  // there is no room yet
  std::deque<ExchangePtr> line_;                                        // not yet started
  ExchangePtr under_way_;
  std::deque<ExchangePtr> held_;  // nobody has taken their results
  std::deque<std::function<void()>> ready_;
};

inline std::shared_ptr<Flight> Shared(tensorflow::core::RefCountPtr<Flight> flight) {
  return {flight.release(), [](Flight* held) { held->Unref(); }};
}

}  // namespace tfscale

#endif  // TFSCALE_KERNELS_FLIGHT_H_
