// The progress thread of the process: brings what links receive, and writes what they could not
// write at once. It looks for a tenth of a millisecond without a pause, and then sleeps.
#ifndef TFSCALE_TRANSPORT_SOCKETS_LOOP_H_
#define TFSCALE_TRANSPORT_SOCKETS_LOOP_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "custom_ops/transport/sockets/link.h"

namespace tfscale {
namespace sockets {

class Loop {
 public:
  static constexpr std::chrono::microseconds kSpin{100};

  // Never destroyed: its thread lives as long as the process.
  static Loop& Get();

  void Add(const std::shared_ptr<Link>& link);

  // Afterwards the link is not called any more, but for a call that has begun.
  void Remove(const Link* link);

  // Whether the descriptor is to be waited for until it can be written.
  void WantToWrite(const Link* link, bool wants);

 private:
  Loop();
  void Run();
  bool Handle(int timeout_ms);
  std::vector<std::shared_ptr<Link>> Links();

  const int epoll_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Link>> links_;
  std::unordered_map<const Link*, uint64_t> numbers_;
  uint64_t next_ = 1;
  std::atomic<uint64_t> changes_{0};
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_LOOP_H_
