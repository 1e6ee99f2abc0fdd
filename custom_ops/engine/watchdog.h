// One thread for the whole process that looks, ten times a second, whether
// anything has waited too long.
#ifndef TFSCALE_ENGINE_WATCHDOG_H_
#define TFSCALE_ENGINE_WATCHDOG_H_

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

namespace tfscale {

using Clock = std::chrono::steady_clock;

class Watched {
 public:
  virtual ~Watched() = default;
  virtual void Tick(Clock::time_point now) = 0;
};

class Watchdog {
 public:
  static constexpr std::chrono::milliseconds kInterval{100};

  static Watchdog& Get();

  // Ticks until the object is gone.
  void Watch(std::weak_ptr<Watched> watched);

 private:
  Watchdog();
  void Loop();

  std::mutex mutex_;
  std::vector<std::weak_ptr<Watched>> watched_;
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_WATCHDOG_H_
