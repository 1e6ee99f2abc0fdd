#include "custom_ops/engine/watchdog.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace tfscale {

// Never destroyed: its thread lives as long as the process.
Watchdog& Watchdog::Get() {
  static Watchdog* watchdog = new Watchdog;
  return *watchdog;
}

Watchdog::Watchdog() {
  std::thread([this] { Loop(); }).detach();
}

void Watchdog::Watch(std::weak_ptr<Watched> watched) {
  std::lock_guard<std::mutex> lock(mutex_);
  watched_.push_back(std::move(watched));
}

void Watchdog::Loop() {
  for (;;) {
    std::this_thread::sleep_for(kInterval);
    std::vector<std::shared_ptr<Watched>> alive;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto gone = [&alive](const std::weak_ptr<Watched>& weak) {
        std::shared_ptr<Watched> watched = weak.lock();
        if (watched == nullptr) return true;
        alive.push_back(std::move(watched));
        return false;
      };
      watched_.erase(std::remove_if(watched_.begin(), watched_.end(), gone), watched_.end());
    }
    for (auto& watched : alive) watched->Tick(Clock::now());
  }
}

}  // namespace tfscale
