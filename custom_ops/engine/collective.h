// Runs one rank's program over one buffer: the engine itself.
#ifndef TFSCALE_ENGINE_COLLECTIVE_H_
#define TFSCALE_ENGINE_COLLECTIVE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "custom_ops/engine/bucket.h"
#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/engine/layout.h"
#include "custom_ops/engine/program.h"
#include "custom_ops/engine/status.h"
#include "custom_ops/engine/transport.h"
#include "custom_ops/engine/watchdog.h"
#include "custom_ops/wire/codec.h"

namespace tfscale {

class Communicator;

// What to run. `x` holds this rank's contribution and `y` receives the result;
// both have layout.count() numbers and may be the same memory.
struct Request {
  BucketId bucket;
  std::string name;       // the bucket's, and which iteration of a loop; the same on all ranks
  std::string signature;  // all that ranks must agree on, readable
  int64_t step = 0;       // the caller's step, 0 if unknown: see Communicator
  std::shared_ptr<const Program> program;
  Layout layout = Layout::Joined(0, 1, 1, 1);
  const wire::Codec* codec = nullptr;
  wire::Element element = wire::Element::kFloat32;
  wire::Rounding rounding;
  bool mean = false;
  const uint8_t* x = nullptr;
  uint8_t* y = nullptr;
  const float* residual = nullptr;  // what earlier encodings lost; both or neither
  float* new_residual = nullptr;    // not the same memory
  std::shared_ptr<void> owner;      // keeps all these buffers alive
  Open open;
};

class Collective : public std::enable_shared_from_this<Collective> {
 public:
  Collective(Request request, std::shared_ptr<Communicator> communicator, uint32_t generation,
             uint32_t execution, Done done);

  void Start();

  // Called by the communicator when all ranks give up: ends what is under way, and
  // later tells the caller. Report() only if Stop() says that it is still owed.
  bool Stop();
  void Report(const Status& why);

  // Called by the watchdog.
  void CheckProgress(Clock::time_point now);

  const Request& request() const { return request_; }
  uint32_t generation() const { return generation_; }

  // True while it waits for this rank.
  bool NeedsMessagesOf(int peer) const;

  // Gives up on behalf of all ranks.
  void Fail(const Status& why);

 private:
  struct Addend {
    const uint8_t* bytes;
    std::shared_ptr<void> owner;
  };
  struct Piece {
    bool in_y = false;            // what this rank has is in y; before, it is in x
    std::vector<Addend> addends;  // received and not yet added
  };

  // One run of the whole program over one part of the buffer. Its steps run
  // one at a time; different parts run at the same time.
  struct Part {
    int64_t index = 0;
    std::mutex mutex;
    bool running = false;
    std::vector<int> missing;  // per step: what it still waits for
    std::vector<int> ready;
    size_t steps_left = 0;
    std::vector<Piece> pieces;     // per chunk
    std::vector<View> received;    // per step that receives into a buffer of its own
    View final_bytes;              // of all chunks, one after the other
    std::vector<int64_t> offsets;  // per chunk, into final_bytes
  };
  using PartPtr = std::shared_ptr<Part>;

  void StartEmpty();
  void ActivateNext();
  PartPtr MakePart(int64_t index);
  void AddResidual(const Part& part);
  template <typename T>
  void AddResidualTo(const Span& span);
  void PostReceive(const PartPtr& part, int step);
  void Arrived(const PartPtr& part, int step, const Status& status);
  void Drain(const PartPtr& part);
  void Execute(const PartPtr& part, int step);
  void Send(const PartPtr& part, const Step& step);
  void Add(Part* part, int step);
  void Finalise(Part* part, const Step& step);
  void FinishInY(Part* part, int chunk);
  void KeepExact(Part* part, int chunk);
  void EncodePiece(Part* part, int chunk, uint8_t* bytes, bool final);
  const float* Sum(const Part& part, int chunk, const Span& tile, float* scratch,
                   int divisor) const;
  int Divisor() const;
  void Keep(Part* part, int step);
  void Closed();
  void Succeed();
  void Record() const;

  View Partial(Part* part, const Step& step);
  View InPlace(const Part& part, const Step& step) const;
  int64_t MessageBytes(const Part& part, const Step& step) const;
  const uint8_t* Base(const Part& part, int chunk) const;
  uint8_t* Y(const Part& part, int chunk) const;
  Span PieceOf(const Part& part, int chunk) const;
  wire::Rounding RoundingAt(int64_t first) const;
  void KeepLoss(const uint8_t* bytes, const float* before, const Span& span, float times) const;
  void ForgetInfinite();
  void NoteFinite(const Part& part, int chunk);

  Key DataKey(const Part& part, const Step& step) const;
  void Ask();
  void Introduced();
  std::vector<int> Silent(Clock::time_point now, const std::vector<int>& among) const;
  std::vector<int> Needed() const;
  void WarnOfLate(Clock::time_point now, double seconds);
  void Expire(Clock::time_point now, double seconds, bool last_word);
  void Heard(int from, const View& bytes, const Status& status);
  std::string About(int peer) const;

  const Request request_;
  const std::shared_ptr<Communicator> communicator_;
  const uint32_t generation_, execution_;
  const uint64_t data_id_, name_id_;
  const std::shared_ptr<BufferPool> pool_;
  const Clock::time_point began_;
  const int64_t began_at_;  // the same moment, as the wall clock shows it
  std::shared_ptr<Channel> channel_;
  Done done_;

  std::atomic<int64_t> next_part_{0};
  std::atomic<int> to_activate_{0};
  std::atomic<int64_t> open_;     // parts not finished and messages not taken
  std::atomic<int64_t> sent_{0};  // bytes that peers have taken
  std::atomic<bool> over_{false};
  std::atomic<bool> finite_{true};

  std::atomic<Clock::rep> last_progress_;
  std::atomic<bool> asked_{false}, warned_{false};
  std::vector<std::atomic<int>> awaited_, untaken_;  // messages, per peer
  std::vector<int> company_;                         // whose hellos it waits for, if it asks
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_COLLECTIVE_H_
