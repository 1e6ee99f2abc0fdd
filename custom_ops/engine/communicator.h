// A rank's membership in a group: which collectives run, and how ranks agree
// to go on or to give up.
//
// The handshake costs nothing while all goes well. Every message's key holds a
// hash of the collective's signature, so ranks that disagree never exchange
// data; they stall. A collective that has made no progress for kStall says
// hello (its signature) to all ranks and reads the hellos of the ranks that it
// talks to: a different signature is the reason, and it is refused by name.
//
// Whoever stalls also gives and takes signs of life (pulse.h), so that an error names
// the rank that is stuck, and none that waits elsewhere.
//
// A rank that gives up says farewell, and why, to all ranks. Whoever stalls
// also listens for farewells, and gives up for the same reason; where a transport
// awaits for free, all listen from the start. A rank that has
// nothing running when it hears one gives up what it starts next: that belongs
// to the step that others have given up.
// A step may also fail between collectives, where nothing tells the others: then
// its process says farewell on demand.
// A rank whose program ends announces its exit: the generation goes on, and only collectives that
// stall and still need that rank give up.
// Nobody waits for a detached collective. If it fails, or a farewell comes while nothing else runs,
// this rank gives up what it starts next, too.
// A rank that runs no collectives of ours may watch: it then listens without them, and
// keeps what it has heard.
//
// Then every rank has moved to the next generation, whose keys differ from all
// that came before, and the group can go on. Ranks of one process (a family) fail
// by the same step of TensorFlow's, so they change generations together; a rank
// that was done already would otherwise be one behind, step after step.
#ifndef TFSCALE_ENGINE_COMMUNICATOR_H_
#define TFSCALE_ENGINE_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/engine/collective.h"
#include "custom_ops/engine/log.h"
#include "custom_ops/engine/notice.h"
#include "custom_ops/engine/pulse.h"

namespace tfscale {

// How long a collective waits without any progress.
struct Patience {
  std::chrono::milliseconds deadline;  // before it is given up
  std::chrono::milliseconds slow_after{
      0};  // before a rank without a sign of life is named; 0: never
  std::function<void(const std::string&)> warn = nullptr;  // where that is said
};

class Communicator : public Watched, public std::enable_shared_from_this<Communicator> {
 public:
  static constexpr std::chrono::milliseconds kStall{300};
  static constexpr int kBeats = 8;                          // signs of life during a deadline
  static constexpr std::chrono::milliseconds kLinger{600};  // others stall and listen

  // `peers` says who each rank is, for messages: "worker 2 at 10.0.0.3:2222".
  static std::shared_ptr<Communicator> Make(int rank, std::vector<std::string> peers,
                                            Patience patience);
  ~Communicator() override;

  // Joins the ranks of this process that share the key.
  void JoinFamily(int key);

  // How many families have a rank that lives.
  static size_t FamiliesOfProcess();

  // Runs a collective and calls `done` once. A step of the caller's that has
  // failed once stays failed: what it starts afterwards is refused at once, so
  // that no rank waits for a half-finished step of another.
  std::shared_ptr<Collective> Start(Request request, Done done);

  // Runs a collective that nobody waits for. Calls `started` once: when this one has begun, which
  // is when the last one of its name is over, or with the reason why it has not.
  void StartDetached(Request request, Done started);

  // Ends, for all ranks, the detached collective of this name, for which others of its name wait.
  void GiveUpDetached(const std::string& name, const Status& why);

  // Says, when nothing may be running, that this rank's step has failed: all
  // ranks give up what they wait in, or start next. Calls `told` once, when all
  // of them have heard it, at the latest after `linger`.
  void GiveUp(const std::string& reason, const Open& open, std::chrono::milliseconds linger,
              std::function<void()> told);

  // Says that this rank's program ends, and how. Collectives of others that need it fail; those
  // that do not need it go on. Calls `told` once, as GiveUp does.
  void AnnounceExit(const std::string& reason, const Open& open, std::chrono::milliseconds linger,
                    std::function<void()> told);

  // From now on listens though nothing runs, as soon as that is free; and what has been heard of
  // ranks that gave up or are gone, in words, or OK. For those whose steps run other collectives.
  Status Watch(const Open& open);

  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(peers_.size()); }
  const std::vector<int>& Others() const { return others_; }
  const Patience& patience() const { return patience_; }
  const std::shared_ptr<BufferPool>& pool() const { return pool_; }
  Log& log() { return log_; }
  std::string Describe(int rank) const;
  std::string Describe(const std::string& bucket, int rank) const;

  // The error of a collective that needs this rank, which is gone.
  Status Gone(const std::string& bucket, int rank, const Status& status) const;

  void Tick(Clock::time_point now) override;

  // For Collective.
  void Finished(const Collective& collective);
  void GiveUp(const Collective& collective, const Status& why);
  void Listen(const Collective& collective);
  void Beat(uint32_t generation, Clock::time_point now);
  bool IsWaiting(int rank, Clock::time_point now) const;
  Status ExitThatStalls(const Collective& collective) const;

 private:
  // The end of a generation on this rank. Its collectives fail only when all
  // ranks have taken the farewell, or had time to: a process that fails may end
  // at once, and would be blamed itself by those that have not heard why. So each
  // rank takes the farewells of all others, though it has left already.
  struct Parting {
    explicit Parting(Status why) : why(std::move(why)) {}

    const Status why;
    Notice::Kind kind = Notice::Kind::kFarewell;
    Open open;                   // without it, a rank with nothing running says nothing
    std::function<void()> told;  // or nobody
    std::map<std::string, std::shared_ptr<Collective>> running;  // until it is stopped
    std::vector<std::shared_ptr<Collective>> victims;
    std::shared_ptr<Pulse> pulse;
    std::shared_ptr<Channel> channel, listening;
    Clock::time_point until = Clock::now() + kLinger;
    std::mutex mutex;
    std::set<int> untaken;  // the ranks that have not heard it
    std::atomic<bool> reported{false};

    void TakenBy(int rank);
    void Report();
    void Cancel();
  };

  static constexpr size_t kPartings = 16;

  Communicator(int rank, std::vector<std::string> peers, Patience patience);

  // A detached collective that waits for the last one of its name.
  struct Queued {
    Request request;
    Done started;
  };

  Status Admit(const Request& request) const;
  void StartFirst(const std::string& name);
  void DetachedEnded(const std::string& name, const Status& status);
  bool IsWaitedFor() const;
  bool SiblingsAreWaitedFor() const;
  void GiveUp(uint32_t generation, const Status& why, std::set<int64_t> failed_steps);
  void LeaveWithFamily(uint32_t generation, const std::shared_ptr<Parting>& parting,
                       std::set<int64_t> failed_steps);
  bool LeaveGeneration(uint32_t generation, const std::shared_ptr<Parting>& parting,
                       std::set<int64_t>* failed_steps);
  void StopWhatRan(uint32_t generation, const std::shared_ptr<Parting>& parting);
  void Remember(const std::shared_ptr<Parting>& parting);
  void SayFarewell(uint32_t generation, const std::shared_ptr<Parting>& parting);
  void Tell(uint32_t generation, const std::shared_ptr<Parting>& parting);
  void Listen(uint32_t generation, const Open& open);
  void ListenTo(uint32_t generation, const std::shared_ptr<Channel>& channel);
  void Heard(uint32_t generation, int from, const View& bytes, const Status& status);
  void HeardThatItExits(uint32_t generation, int from, const Notice& notice);
  void HeardThatItIsGone(uint32_t generation, int from, const Status& status);
  Key FarewellKey(uint32_t generation) const;

  const int rank_;
  const std::vector<std::string> peers_;
  const std::vector<int> others_;  // all ranks but this one
  const Patience patience_;
  const std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  Log log_;

  int family_ = 0;  // none

  mutable std::mutex mutex_;
  uint32_t generation_ = 0;
  std::map<std::string, uint32_t> executions_;  // of this generation
  std::map<std::string, std::shared_ptr<Collective>> running_;
  std::map<std::string, std::deque<Queued>> detached_;  // the first of each name runs
  std::set<int64_t> failed_steps_;
  Status last_failure_;
  bool watches_ = false;                           // for others that are gone
  Status told_;                                    // heard while nobody waited
  std::map<int, std::string> exits_;               // how programs of ranks have ended
  std::map<int, std::string> farewells_;           // why ranks gave up last, in their words
  std::shared_ptr<Channel> listening_;             // for farewells of this generation
  std::shared_ptr<Pulse> pulse_;                   // likewise; only once something stalled
  std::deque<std::shared_ptr<Parting>> partings_;  // the last few
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_COMMUNICATOR_H_
