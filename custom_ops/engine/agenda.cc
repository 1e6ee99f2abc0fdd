#include "custom_ops/engine/agenda.h"

namespace tfscale {

Agenda::Agenda(const Program& program)
    : program_(program), missing_(program.waits_for), steps_left_(program.steps.size()) {
  for (size_t s = 0; s < program.steps.size(); ++s) {
    if (program.steps[s].receives()) ++missing_[s];
    if (missing_[s] == 0) ready_.push_back(static_cast<int>(s));
  }
}

bool Agenda::Arrived(int step) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--missing_[step] > 0) return false;
  ready_.push_back(step);
  if (running_) return false;
  running_ = true;
  return true;
}

}  // namespace tfscale
