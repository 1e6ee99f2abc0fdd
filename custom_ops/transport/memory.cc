#include "custom_ops/transport/memory.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace tfscale {
namespace {

using Address =
    std::tuple<int, int, uint64_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>;

Address AddressOf(int from, int to, const Key& k) {
  return {from, to, k.collective, k.generation, k.execution, k.part, k.kind, k.first, k.last};
}

struct Posted {
  View bytes;
  Done done;
  const void* channel;
};

struct Awaited {
  View into;
  Taken done;
  const void* channel;
};

using Task = std::function<void()>;

}  // namespace

class MemoryNetwork::Hub {
 public:
  explicit Hub(uint64_t seed) : random_(seed) {}

  // The threads hold the hub: whichever task lets go of the last channel, it
  // does not take the hub away from under its own thread.
  static std::shared_ptr<Hub> Make(int threads, uint64_t seed) {
    auto hub = std::make_shared<Hub>(seed);
    std::lock_guard<std::mutex> lock(hub->mutex_);
    for (int i = 0; i < threads; ++i) hub->threads_.emplace_back([hub] { hub->Deliver(); });
    return hub;
  }

  // Delivers what is on its way and ends the threads.
  void Close() {
    std::vector<std::thread> threads;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
      threads.swap(threads_);
    }
    work_.notify_all();
    for (auto& thread : threads) {
      const bool own = thread.get_id() == std::this_thread::get_id();
      own ? thread.detach() : thread.join();
    }
  }

  // A post to a dead host is never taken.
  void Post(int from, int to, const Key& key, Posted mine) {
    const Address address = AddressOf(from, to, key);
    std::unique_lock<std::mutex> lock(mutex_);
    auto receiver = awaited_.find(address);
    if (receiver != awaited_.end()) {
      Task task = Transfer(std::move(mine), std::move(receiver->second));
      awaited_.erase(receiver);
      Do(&lock, std::move(task));
    } else if (!posted_.emplace(address, mine).second) {
      Do(&lock, [done = mine.done] { done(Status(Code::kInternal, kTwice)); });
    }
  }

  // A receive from one fails.
  void Receive(int from, int to, const Key& key, Awaited mine) {
    const Address address = AddressOf(from, to, key);
    std::unique_lock<std::mutex> lock(mutex_);
    if (dead_.count(from) != 0 || dead_.count(to) != 0) {
      return Do(&lock, Failing(std::move(mine.done), Code::kUnavailable, kReset));
    }
    auto sender = posted_.find(address);
    if (sender != posted_.end()) {
      Task task = Transfer(std::move(sender->second), std::move(mine));
      posted_.erase(sender);
      Do(&lock, std::move(task));
    } else if (!awaited_.emplace(address, mine).second) {
      Do(&lock, Failing(std::move(mine.done), Code::kInternal, kTwice));
    }
  }

  void Cancel(const void* channel) {
    std::vector<Posted> posted;
    std::vector<Awaited> awaited;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      TakeOut(&posted_, channel, &posted);
      TakeOut(&awaited_, channel, &awaited);
    }
    const Status cancelled(Code::kCancelled, "cancelled");
    for (auto& one : posted) one.done(cancelled);
    for (auto& one : awaited) one.done(cancelled, View());
  }

  void Kill(int rank) {
    std::vector<Taken> failed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      dead_.insert(rank);
      for (auto it = awaited_.begin(); it != awaited_.end();) {
        const bool hit = std::get<0>(it->first) == rank || std::get<1>(it->first) == rank;
        if (hit) failed.push_back(std::move(it->second.done));
        it = hit ? awaited_.erase(it) : std::next(it);
      }
    }
    for (auto& done : failed) Failing(std::move(done), Code::kUnavailable, kReset)();
  }

  int64_t messages_ = 0, bytes_ = 0;
  mutable std::mutex mutex_;

 private:
  static constexpr const char* kReset = "connection reset";
  static constexpr const char* kTwice = "a key was used twice";

  static Task Failing(Taken done, Code code, std::string why) {
    return [done, code, why] { done(Status(code, why), View()); };
  }

  // Where the receiver has no place for the bytes, it gets them where they lie.
  Task Transfer(Posted from, Awaited to) {
    ++messages_;
    bytes_ += static_cast<int64_t>(from.bytes.size);
    return [from, to] {
      if (from.bytes.size != to.into.size) {
        const Status status(Code::kInternal, "sizes differ");
        from.done(status);
        return to.done(status, View());
      }
      if (to.into.data == nullptr) return to.done(Status(), Lent(from.bytes, from.done));
      std::memcpy(to.into.data, from.bytes.data, from.bytes.size);
      from.done(Status());
      to.done(Status(), to.into);
    };
  }

  // Runs a task outside the lock: here and now, or on one of the threads.
  void Do(std::unique_lock<std::mutex>* lock, Task task) {
    if (threads_.empty()) {
      lock->unlock();
      return task();
    }
    tasks_.push_back(std::move(task));
    std::uniform_int_distribution<size_t> any(0, tasks_.size() - 1);
    std::swap(tasks_.back(), tasks_[any(random_)]);
    work_.notify_one();
  }

  void Deliver() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.back());
      tasks_.pop_back();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  template <typename Waiting>
  static void TakeOut(std::map<Address, Waiting>* from, const void* channel,
                      std::vector<Waiting>* taken) {
    for (auto it = from->begin(); it != from->end();) {
      const bool hit = it->second.channel == channel;
      if (hit) taken->push_back(std::move(it->second));
      it = hit ? from->erase(it) : std::next(it);
    }
  }

  std::condition_variable work_;
  bool closing_ = false;
  std::map<Address, Posted> posted_;
  std::map<Address, Awaited> awaited_;
  std::set<int> dead_;
  std::vector<Task> tasks_;
  std::mt19937_64 random_;
  std::vector<std::thread> threads_;
};

namespace {

class MemoryChannel : public Channel {
 public:
  MemoryChannel(std::shared_ptr<MemoryNetwork::Hub> hub, int rank)
      : hub_(std::move(hub)), rank_(rank) {}

  void Post(int to, const Key& key, View bytes, Done done) override {
    if (cancelled_) return done(Cancelled());
    hub_->Post(rank_, to, key, {std::move(bytes), std::move(done), this});
    if (cancelled_) hub_->Cancel(this);  // Cancel() may have come in between
  }
  void Receive(int from, const Key& key, View into, Taken done) override {
    if (cancelled_) return done(Cancelled(), View());
    hub_->Receive(from, rank_, key, {std::move(into), std::move(done), this});
    if (cancelled_) hub_->Cancel(this);
  }
  void Cancel() override {
    cancelled_ = true;
    hub_->Cancel(this);
  }

 private:
  static Status Cancelled() { return Status(Code::kCancelled, "cancelled"); }

  const std::shared_ptr<MemoryNetwork::Hub> hub_;
  const int rank_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace

MemoryNetwork::MemoryNetwork(int threads, uint64_t seed) : hub_(Hub::Make(threads, seed)) {}
MemoryNetwork::~MemoryNetwork() { hub_->Close(); }

std::shared_ptr<Channel> MemoryNetwork::Open(int rank) {
  return std::make_shared<MemoryChannel>(hub_, rank);
}

void MemoryNetwork::Kill(int rank) { hub_->Kill(rank); }

int64_t MemoryNetwork::messages() const {
  std::lock_guard<std::mutex> lock(hub_->mutex_);
  return hub_->messages_;
}

int64_t MemoryNetwork::bytes() const {
  std::lock_guard<std::mutex> lock(hub_->mutex_);
  return hub_->bytes_;
}

}  // namespace tfscale
