// What a communicator ran: the last collectives one by one, and totals of all.
#ifndef TFSCALE_ENGINE_LOG_H_
#define TFSCALE_ENGINE_LOG_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "custom_ops/engine/bucket.h"

namespace tfscale {

// One collective on one rank, whether it worked or not.
struct Execution {
  BucketId bucket;
  int64_t start = 0, end = 0;  // microseconds of the wall clock, which the ranks of a host share
  int64_t sent = 0;            // bytes of data that other ranks have taken
};

class Log {
 public:
  static constexpr size_t kKept = 4096;

  struct Total {
    int64_t calls = 0, sent = 0;
    int64_t microseconds = 0;  // of collectives at the same time, each counts
  };

  void Record(const Execution& execution);

  // The last ones, kKept or fewer, in the order in which they ended.
  std::vector<Execution> Executions(size_t most = kKept) const;
  std::map<BucketId, Total> Totals() const;

 private:
  struct Entry {
    const BucketId* bucket;  // a key of totals_
    int64_t start, end, sent;
  };

  mutable std::mutex mutex_;
  std::deque<Entry> last_;
  std::map<BucketId, Total> totals_;
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_LOG_H_
