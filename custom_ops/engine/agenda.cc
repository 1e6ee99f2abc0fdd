#include "custom_ops/engine/agenda.h"

namespace tfscale {

Agenda::Agenda(const Program& program)
    : program_(program), missing_(program.waits_for), moves_left_(program.moves.size()) {
  for (size_t s = 0; s < program.moves.size(); ++s) {
    if (program.moves[s].receives()) ++missing_[s];
    if (missing_[s] == 0) ready_.push_back(static_cast<int>(s));
  }
}

bool Agenda::Arrived(int move) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--missing_[move] > 0) return false;
  ready_.push_back(move);
  if (running_) return false;
  running_ = true;
  return true;
}

}  // namespace tfscale
