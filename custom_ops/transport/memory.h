// A network of ranks in one process, for tests: threads, no sockets. It can
// lose a rank, delay messages and deliver from its own threads.
#ifndef TFSCALE_TRANSPORT_MEMORY_H_
#define TFSCALE_TRANSPORT_MEMORY_H_

#include <functional>
#include <memory>
#include <utility>

#include "custom_ops/engine/transport.h"

namespace tfscale {

class MemoryNetwork {
 public:
  // With `threads` == 0 whoever completes a pair of post and receive delivers
  // it; otherwise that many threads deliver, in random order.
  explicit MemoryNetwork(int threads = 0, uint64_t seed = 1);
  ~MemoryNetwork();

  std::shared_ptr<Channel> Open(int rank);

  // From now on every message from or to this rank fails as if its host had
  // gone (kUnavailable); messages already delivered stay delivered.
  void Kill(int rank);

  // How many messages and bytes were delivered.
  int64_t messages() const;
  int64_t bytes() const;

  class Hub;

 private:
  std::shared_ptr<Hub> hub_;
};

}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_MEMORY_H_
