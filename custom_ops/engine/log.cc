#include "custom_ops/engine/log.h"

#include <algorithm>

namespace tfscale {

void Log::Record(const Execution& execution) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& [bucket, total] = *totals_.try_emplace(execution.bucket).first;
  ++total.calls;
  total.sent += execution.sent;
  total.microseconds += execution.end - execution.start;
  if (last_.size() == kKept) last_.pop_front();
  last_.push_back({&bucket, execution.start, execution.end, execution.sent});
}

std::vector<Execution> Log::Executions(size_t most) const {
  std::vector<Execution> executions;
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = last_.size() - std::min(most, last_.size()); i < last_.size(); ++i) {
    const Entry& entry = last_[i];
    executions.push_back({*entry.bucket, entry.start, entry.end, entry.sent});
  }
  return executions;
}

std::map<BucketId, Log::Total> Log::Totals() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return totals_;
}

}  // namespace tfscale
