// Why a collective makes no progress: do ranks run different things, is one late, is
// one stuck? See communicator.h for what ranks tell each other then.
#ifndef TFSCALE_ENGINE_DIAGNOSIS_H_
#define TFSCALE_ENGINE_DIAGNOSIS_H_

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "custom_ops/engine/progress.h"
#include "custom_ops/engine/request.h"
#include "custom_ops/engine/status.h"
#include "custom_ops/engine/transport.h"
#include "custom_ops/engine/watchdog.h"

namespace tfscale {

class Communicator;

class Diagnosis {
 public:
  // Gets an error if ranks do not agree, or one is gone. It keeps this object alive.
  using Heard = std::function<void(const Status&)>;

  Diagnosis(const Request& request, const Communicator& communicator, const Progress& progress)
      : request_(request), communicator_(communicator), progress_(progress) {}

  // Tells all ranks what this rank runs, and asks its company what they run. Calls `heard`
  // once for each hello that is taken or comes.
  void ExchangeHellos(const Key& key, Channel* channel, const Heard& heard) const;

  // Warns of late ranks, once; an error, if this has lasted too long and it is this
  // rank's turn to say so.
  Status Judge(Clock::time_point now, Clock::time_point last_progress);

  // If it has warned, says that the collective is done after all.
  void Ended(Clock::duration took) const;

 private:
  void Hear(int from, const View& bytes, const Status& status, const Heard& heard) const;
  void WarnOfLate(Clock::time_point now, double seconds);
  Status Blame(Clock::time_point now, double seconds, bool last_word) const;
  std::vector<int> Needed() const;
  std::vector<int> Silent(Clock::time_point now, const std::vector<int>& among) const;

  const Request& request_;
  const Communicator& communicator_;
  const Progress& progress_;
  std::atomic<bool> warned_{false};
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_DIAGNOSIS_H_
