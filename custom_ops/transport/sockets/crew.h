// Threads for what ranks of one process do with each other's large messages; a small one is
// handled where it is posted.
#ifndef TFSCALE_TRANSPORT_SOCKETS_CREW_H_
#define TFSCALE_TRANSPORT_SOCKETS_CREW_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

namespace tfscale {
namespace sockets {

class Crew {
 public:
  using Task = std::function<void()>;

  // Never destroyed: its threads live as long as the process.
  static Crew& Get();

  // Runs it, now or soon; never within another task of the same thread.
  void Run(size_t bytes, Task task);

 private:
  Crew();
  void Work();

  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<Task> tasks_;
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_CREW_H_
