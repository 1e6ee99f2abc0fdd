#include "custom_ops/transport/sockets/crew.h"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace tfscale {
namespace sockets {
namespace {

constexpr size_t kWorthAThread = size_t{64} << 10;
constexpr unsigned kMost = 8;  // threads

}  // namespace

Crew& Crew::Get() {
  static Crew* crew = new Crew;
  return *crew;
}

Crew::Crew() {
  const unsigned threads = std::min(std::max(1u, std::thread::hardware_concurrency()), kMost);
  for (unsigned i = 0; i < threads; ++i) std::thread([this] { Work(); }).detach();
}

void Crew::Run(size_t bytes, Task task) {
  if (bytes >= kWorthAThread) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    return some_.notify_one();
  }
  // One task posts the message that begins the next; on a stack they would pile up.
  static thread_local std::deque<Task>* waiting = nullptr;
  if (waiting != nullptr) return waiting->push_back(std::move(task));
  std::deque<Task> mine;
  waiting = &mine;
  task();
  for (; !mine.empty(); mine.pop_front()) mine.front()();
  waiting = nullptr;
}

void Crew::Work() {
  pthread_setname_np(pthread_self(), "tfscale/local");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    some_.wait(lock, [this] { return !tasks_.empty(); });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace sockets
}  // namespace tfscale
