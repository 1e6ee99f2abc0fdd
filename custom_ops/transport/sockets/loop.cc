#include "custom_ops/transport/sockets/loop.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <thread>

#include "custom_ops/engine/watchdog.h"

namespace tfscale {
namespace sockets {
namespace {

constexpr int kEvents = 64;

}  // namespace

Loop& Loop::Get() {
  static Loop* loop = new Loop;
  return *loop;
}

// A forked child must not keep connections open: peers hear of a process's end when they close.
Loop::Loop() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); },
                 [] {
                   for (auto& entry : Get().links_) close(entry.second->Descriptor());
                   Get().mutex_.unlock();
                 });
  std::thread([this] { Run(); }).detach();
}

void Loop::Add(const std::shared_ptr<Link>& link) {
  epoll_event event = {};
  event.events = EPOLLIN;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = next_++;  // an epoll_event is packed: nothing may refer to its members
    event.data.u64 = number;
    links_[number] = link;
    numbers_[link.get()] = number;
    ++changes_;
  }
  epoll_ctl(epoll_, EPOLL_CTL_ADD, link->Descriptor(), &event);
}

void Loop::Remove(const Link* link) {
  std::shared_ptr<Link> removed;  // let go of outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto number = numbers_.find(link);
  if (number == numbers_.end()) return;
  removed = std::move(links_[number->second]);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, link->Descriptor(), nullptr);
  links_.erase(number->second);
  numbers_.erase(number);
  ++changes_;
}

void Loop::WantToWrite(const Link* link, bool wants) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto number = numbers_.find(link);
  if (number == numbers_.end()) return;
  epoll_event event = {};
  event.events = wants ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = number->second;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, link->Descriptor(), &event);
}

std::vector<std::shared_ptr<Link>> Loop::Links() {
  std::vector<std::shared_ptr<Link>> links;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& entry : links_) links.push_back(entry.second);
  return links;
}

bool Loop::Handle(int timeout_ms) {
  epoll_event events[kEvents];
  const int found = epoll_wait(epoll_, events, kEvents, timeout_ms);
  for (int i = 0; i < found; ++i) {
    std::shared_ptr<Link> link;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const uint64_t number = events[i].data.u64;
      const auto entry = links_.find(number);
      if (entry != links_.end()) link = entry->second;
    }
    const bool read = (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
    if (link != nullptr) link->Ready(read, (events[i].events & EPOLLOUT) != 0);
  }
  return found > 0;
}

void Loop::Run() {
  pthread_setname_np(pthread_self(), "tfscale/sockets");
  std::vector<std::shared_ptr<Link>> links;
  uint64_t seen = 0;
  Clock::time_point busy_at = Clock::now();
  for (;;) {
    if (const uint64_t now = changes_; now != seen) {
      links = Links();
      seen = now;
    }
    bool busy = Handle(0);
    for (auto& link : links) busy = link->Poll() || busy;
    if (busy) {
      busy_at = Clock::now();
      continue;
    }
    if (Clock::now() - busy_at < kSpin) {
      sched_yield();
      continue;
    }
    for (auto& link : links) link->Sleeps(true);
    for (auto& link : links) busy = link->Poll() || busy;
    if (!busy) {
      links.clear();  // a link that is removed meanwhile can end
      seen = 0;
      Handle(-1);
      links = Links();
    }
    for (auto& link : links) link->Sleeps(false);
    busy_at = Clock::now();
  }
}

}  // namespace sockets
}  // namespace tfscale
