#include "custom_ops/engine/communicator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "custom_ops/engine/notice.h"
#include "custom_ops/engine/text.h"

namespace tfscale {
namespace {

class Families {
 public:
  static Families& Get() {
    static Families* families = new Families;
    return *families;
  }

  void Join(int key, std::weak_ptr<Communicator> member) {
    std::lock_guard<std::mutex> lock(mutex_);
    members_[key].push_back(std::move(member));
  }

  // After a member has ended.
  void Forget(int key) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = members_.find(key);
    if (found == members_.end()) return;
    auto& all = found->second;
    all.erase(
        std::remove_if(all.begin(), all.end(), [](const auto& member) { return member.expired(); }),
        all.end());
    if (all.empty()) members_.erase(found);
  }

  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return members_.size();
  }

  // Held while the members of a family leave a generation: one that could already leave the next,
  // before another has left this, would be ahead of it for ever.
  std::mutex& leaving() { return leaving_; }

  std::vector<std::shared_ptr<Communicator>> Of(int key) {
    std::vector<std::shared_ptr<Communicator>> alive;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = members_.find(key);
    if (found == members_.end()) return alive;
    for (auto& weak : found->second) {
      if (auto member = weak.lock()) alive.push_back(std::move(member));
    }
    return alive;
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<std::weak_ptr<Communicator>>> members_;
  std::mutex leaving_;
};

std::vector<int> AllBut(int rank, size_t ranks) {
  std::vector<int> others(ranks);
  std::iota(others.begin(), others.end(), 0);
  others.erase(others.begin() + rank);
  return others;
}

}  // namespace

std::shared_ptr<Communicator> Communicator::Make(int rank, std::vector<std::string> peers,
                                                 Patience patience) {
  std::shared_ptr<Communicator> made(new Communicator(rank, std::move(peers), std::move(patience)));
  Watchdog::Get().Watch(made);
  return made;
}

Communicator::Communicator(int rank, std::vector<std::string> peers, Patience patience)
    : rank_(rank),
      peers_(std::move(peers)),
      others_(AllBut(rank_, peers_.size())),
      patience_(std::move(patience)) {}

Communicator::~Communicator() {
  if (listening_ != nullptr) listening_->Cancel();
  if (pulse_ != nullptr) pulse_->Cancel();
  for (auto& parting : partings_) parting->Cancel();
  Families::Get().Forget(family_);
}

size_t Communicator::FamiliesOfProcess() { return Families::Get().size(); }

void Communicator::JoinFamily(int key) {
  family_ = key;
  Families::Get().Join(key, weak_from_this());
}

std::string Communicator::Describe(int rank) const {
  return Text("rank ", rank, " (", peers_[rank], ")");
}

std::string Communicator::Describe(const std::string& bucket, int rank) const {
  return Text("bucket '", bucket, "': ", Describe(rank));
}

Status Communicator::Gone(const std::string& bucket, int rank, const Status& status) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto exit = exits_.find(rank);
  const std::string& why = exit == exits_.end() ? status.message() : exit->second;
  // Only sums behind steps may have failed by its farewell, and nobody has taken them yet.
  const auto farewell = farewells_.find(rank);
  const std::string before =
      farewell == farewells_.end() ? "" : ". It had said before: " + farewell->second;
  return Status(status.code(), Describe(bucket, rank) + " is gone: " + why + before);
}

Status Communicator::Admit(const Request& request) const {
  if (request.step != 0 && failed_steps_.count(request.step) != 0) {
    return last_failure_.KnownToAll();
  }
  if (running_.count(request.name) != 0) {
    return Status(Code::kInvalidArgument,
                  "bucket '" + request.name + "' is already running on " + Describe(rank_) +
                      "; give collectives that run at the same time different names");
  }
  return Status();
}

std::shared_ptr<Collective> Communicator::Start(Request request, Done done) {
  std::shared_ptr<Collective> collective;
  Status status, told;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    status = Admit(request);
    told = told_;
    if (status.ok()) {
      const uint32_t execution = executions_[request.name]++;
      const std::string name = request.name;
      collective = std::make_shared<Collective>(std::move(request), shared_from_this(), generation_,
                                                execution, std::move(done));
      running_[name] = collective;
    }
  }
  if (!status.ok()) {
    done(status);
    return nullptr;
  }
  if (!told.ok()) {
    LeaveWithFamily(collective->generation(), std::make_shared<Parting>(told), {});
    return nullptr;
  }
  collective->Start();
  return collective;
}

void Communicator::StartDetached(Request request, Done started) {
  const std::string name = request.name;
  request.detached = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = detached_[name];
    queue.push_back({std::move(request), std::move(started)});
    if (queue.size() > 1) return;
  }
  StartFirst(name);
}

// The first keeps its place in the queue until it is over.
void Communicator::StartFirst(const std::string& name) {
  Queued first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    first = std::move(detached_[name].front());
  }
  const auto said = std::make_shared<std::atomic<bool>>(false);
  const Done say = [said, started = std::move(first.started)](Status status) {
    if (!said->exchange(true)) started(std::move(status));
  };
  const auto self = shared_from_this();
  const auto running = Start(std::move(first.request), [self, name, say](Status status) {
    say(status);
    self->DetachedEnded(name, status);
  });
  if (running != nullptr) say(Status());
}

// Those that wait for one that failed belong to steps that others will not make.
void Communicator::DetachedEnded(const std::string& name, const Status& status) {
  std::deque<Queued> failed;
  bool next;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = detached_[name];
    queue.pop_front();
    if (!status.ok()) failed.swap(queue);
    next = !queue.empty();
    if (!next) detached_.erase(name);
  }
  for (const Queued& one : failed) one.started(status.KnownToAll());
  if (next) StartFirst(name);
}

void Communicator::GiveUpDetached(const std::string& name, const Status& why) {
  std::shared_ptr<Collective> running;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = running_.find(name);
    if (found != running_.end()) running = found->second;
  }
  if (running != nullptr) running->Fail(why);
}

// Whether anybody would learn now that what runs has failed. The caller holds the mutex.
bool Communicator::IsWaitedFor() const {
  const bool waits = std::any_of(running_.begin(), running_.end(), [](const auto& entry) {
    return !entry.second->request().detached;
  });
  return waits || std::any_of(detached_.begin(), detached_.end(),
                              [](const auto& entry) { return entry.second.size() > 1; });
}

bool Communicator::SiblingsAreWaitedFor() const {
  for (const auto& sibling : Families::Get().Of(family_)) {
    if (sibling.get() == this) continue;
    std::lock_guard<std::mutex> lock(sibling->mutex_);
    if (sibling->IsWaitedFor()) return true;
  }
  return false;
}

void Communicator::Finished(const Collective& collective) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = running_.find(collective.request().name);
  if (it != running_.end() && it->second.get() == &collective) running_.erase(it);
}

// The step of a collective has failed even if the collective has ended meanwhile: then nothing of
// it runs any more that would name it.
void Communicator::GiveUp(const Collective& collective, const Status& why) {
  GiveUp(collective.generation(), why, {collective.request().step});
}

void Communicator::GiveUp(uint32_t generation, const Status& why, std::set<int64_t> failed_steps) {
  const bool siblings = SiblingsAreWaitedFor();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!siblings && !IsWaitedFor()) {
      // With nothing running, what was to fail has ended well meanwhile: it came too late.
      if (!running_.empty() && generation == generation_ && told_.ok()) told_ = why;
      return;
    }
  }
  LeaveWithFamily(generation, std::make_shared<Parting>(why), std::move(failed_steps));
}

void Communicator::GiveUp(const std::string& reason, const Open& open,
                          std::chrono::milliseconds linger, std::function<void()> told) {
  auto parting = std::make_shared<Parting>(
      Status(Code::kCancelled, Text(Describe(rank_), " gave up: ", reason)));
  parting->open = open;
  parting->until = Clock::now() + linger;
  parting->told = std::move(told);
  uint32_t generation;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation = generation_;
  }
  LeaveWithFamily(generation, parting, {});
}

void Communicator::AnnounceExit(const std::string& reason, const Open& open,
                                std::chrono::milliseconds linger, std::function<void()> told) {
  auto parting = std::make_shared<Parting>(Status(Code::kUnavailable, reason));
  parting->kind = Notice::Kind::kExit;
  parting->open = open;
  parting->until = Clock::now() + linger;
  parting->told = std::move(told);
  uint32_t generation;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation = generation_;
  }
  Tell(generation, parting);
  for (auto& sibling : Families::Get().Of(family_)) parting->TakenBy(sibling->rank());
}

// Siblings hear it here, whether they have a channel to hear it by or not.
void Communicator::LeaveWithFamily(uint32_t generation, const std::shared_ptr<Parting>& parting,
                                   std::set<int64_t> failed_steps) {
  std::vector<std::pair<std::shared_ptr<Communicator>, std::shared_ptr<Parting>>> left;
  {
    std::lock_guard<std::mutex> lock(Families::Get().leaving());
    if (LeaveGeneration(generation, parting, &failed_steps)) {
      left.emplace_back(shared_from_this(), parting);
      for (auto& sibling : Families::Get().Of(family_)) {
        auto of_sibling = std::make_shared<Parting>(parting->why);
        if (sibling->LeaveGeneration(generation, of_sibling, &failed_steps)) {
          left.emplace_back(sibling, of_sibling);
        }
      }
    }
  }
  if (left.empty()) return parting->Report();
  const auto siblings = Families::Get().Of(family_);
  for (auto& [member, of_member] : left) {
    member->StopWhatRan(generation, of_member);
    for (auto& sibling : siblings) of_member->TakenBy(sibling->rank());  // they have left, too
  }
}

// Takes the failed steps of others and adds its own.
bool Communicator::LeaveGeneration(uint32_t generation, const std::shared_ptr<Parting>& parting,
                                   std::set<int64_t>* failed_steps) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation != generation_) return false;
  parting->running.swap(running_);
  parting->pulse.swap(pulse_);
  parting->listening.swap(listening_);
  executions_.clear();
  last_failure_ = parting->why;
  told_ = Status();
  ++generation_;
  for (auto& entry : parting->running) failed_steps->insert(entry.second->request().step);
  failed_steps_ = *failed_steps;
  return true;
}

// Ends the collectives of a generation that this rank has left, and tells the others.
void Communicator::StopWhatRan(uint32_t generation, const std::shared_ptr<Parting>& parting) {
  const auto running = std::move(parting->running);
  if (parting->pulse != nullptr) parting->pulse->Cancel();
  if (!running.empty()) parting->open = running.begin()->second->request().open;
  if (parting->open == nullptr) {
    if (parting->listening != nullptr) parting->listening->Cancel();
    return;
  }
  for (auto& entry : running) {
    if (entry.second->Stop()) parting->victims.push_back(entry.second);
  }
  SayFarewell(generation, parting);
}

// Farewells wait for whoever is late. Of those long past, nobody asks any more.
void Communicator::Remember(const std::shared_ptr<Parting>& parting) {
  std::shared_ptr<Parting> forgotten;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    partings_.push_back(parting);
    if (partings_.size() <= kPartings) return;
    forgotten = partings_.front();
    partings_.pop_front();
  }
  forgotten->Report();
  forgotten->Cancel();
}

void Communicator::Parting::Cancel() {
  if (listening != nullptr) listening->Cancel();
  channel->Cancel();
}

void Communicator::Parting::TakenBy(int rank) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (untaken.erase(rank) == 0 || !untaken.empty()) return;
  }
  Report();
}

void Communicator::Parting::Report() {
  if (reported.exchange(true)) return;
  for (auto& victim : victims) victim->Report(why);
  victims.clear();
  if (told != nullptr) told();
  told = nullptr;
}

Key Communicator::FarewellKey(uint32_t generation) const {
  return {0, generation, 0, 0, kFarewellMessage, 0, 0};
}

void Communicator::SayFarewell(uint32_t generation, const std::shared_ptr<Parting>& parting) {
  if (parting->listening == nullptr) {
    parting->listening = parting->open();
    ListenTo(generation, parting->listening);  // others wait for that
  }
  Tell(generation, parting);
}

void Communicator::Tell(uint32_t generation, const std::shared_ptr<Parting>& parting) {
  parting->channel = parting->open();
  parting->untaken.insert(others_.begin(), others_.end());
  Remember(parting);
  Notice notice;
  notice.kind = parting->kind;
  notice.code = parting->why.code();
  notice.text = parting->why.message();
  View bytes = pool_->Get(Notice::kBytes);
  notice.Write(bytes.data);
  for (int to : others_) {
    parting->channel->Post(to, FarewellKey(generation), bytes, [parting, to](Status status) {
      const bool nobody_there = status.code() == Code::kUnavailable;
      if (status.ok() || nobody_there) parting->TakenBy(to);
    });
  }
}

// Once in a generation, to all ranks: those next to this one may have nothing
// running, and then pass nothing on.
void Communicator::Listen(const Collective& collective) {
  Listen(collective.generation(), collective.request().open);
}

void Communicator::Listen(uint32_t generation, const Open& open) {
  std::shared_ptr<Channel> channel;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (generation != generation_ || listening_ != nullptr) return;
    channel = listening_ = open();
    pulse_ =
        std::make_shared<Pulse>(others_, generation, patience_.deadline / kBeats, open(), pool_);
  }
  ListenTo(generation, channel);
}

Status Communicator::Watch(const Open& open) {
  uint32_t generation;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    watches_ = true;
    generation = generation_;
  }
  Listen(generation, open);
  std::lock_guard<std::mutex> lock(mutex_);
  return told_;
}

void Communicator::Beat(uint32_t generation, Clock::time_point now) {
  std::shared_ptr<Pulse> pulse;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (generation == generation_) pulse = pulse_;
  }
  if (pulse != nullptr) pulse->Beat(now);
}

// Half a deadline is several beats, and short enough to notice who stopped while others
// waited.
bool Communicator::IsWaiting(int rank, Clock::time_point now) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return pulse_ != nullptr && pulse_->HeardSince(rank, now - patience_.deadline / 2);
}

void Communicator::ListenTo(uint32_t generation, const std::shared_ptr<Channel>& channel) {
  std::weak_ptr<Communicator> weak = weak_from_this();
  for (int peer : others_) {
    View bytes = pool_->Get(Notice::kBytes);
    channel->Receive(peer, FarewellKey(generation), bytes, [=](Status status, const View&) {
      if (auto self = weak.lock()) self->Heard(generation, peer, bytes, status);
    });
  }
}

void Communicator::Heard(uint32_t generation, int from, const View& bytes, const Status& status) {
  if (status.code() == Code::kCancelled) return;
  if (!status.ok()) return HeardThatItIsGone(generation, from, status);
  Notice notice;
  std::string damage;
  Status why;
  if (Notice::Read(bytes.data, bytes.size, Notice::Kind::kFarewell, &notice, &damage)) {
    if (notice.kind == Notice::Kind::kExit) return HeardThatItExits(generation, from, notice);
    why = Status(notice.code, notice.text);
  } else {
    why = Status(Code::kInvalidArgument, Describe(from) + ": " + damage);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    farewells_[from] = why.message();
    if (generation != generation_) return;
    if (!IsWaitedFor()) {
      told_ = why;
      return;
    }
  }
  GiveUp(generation, why, {});
}

// A peer may leave when all is done: that matters to whoever still needs it.
void Communicator::HeardThatItIsGone(uint32_t generation, int from, const Status& status) {
  std::string bucket;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (watches_ && generation == generation_ && told_.ok()) {
      told_ = Status(status.code(), Describe(from) + " is gone: " + status.message());
    }
    for (auto& entry : running_) {
      if (entry.second->NeedsMessagesOf(from)) bucket = entry.first;
    }
  }
  if (bucket.empty()) return;
  GiveUp(generation, Gone(bucket, from, status), {});
}

// What runs may need it no more: a collective that does will stall.
void Communicator::HeardThatItExits(uint32_t generation, int from, const Notice& notice) {
  std::lock_guard<std::mutex> lock(mutex_);
  exits_.emplace(from, notice.text);
  if (watches_ && generation == generation_ && told_.ok()) {
    told_ = Status(notice.code, Describe(from) + " is gone: " + notice.text);
  }
}

Status Communicator::ExitThatStalls(const Collective& collective) const {
  int rank;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto needed = std::find_if(exits_.begin(), exits_.end(), [&](const auto& exit) {
      return collective.NeedsMessagesOf(exit.first);
    });
    if (needed == exits_.end()) return Status();
    rank = needed->first;
  }
  return Gone(collective.request().name, rank, Status(Code::kUnavailable, ""));
}

void Communicator::Tick(Clock::time_point now) {
  std::vector<std::shared_ptr<Collective>> running;
  std::vector<std::shared_ptr<Parting>> parted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& entry : running_) running.push_back(entry.second);
    for (auto& parting : partings_) {
      if (now >= parting->until) parted.push_back(parting);
    }
  }
  for (auto& parting : parted) parting->Report();
  for (auto& collective : running) collective->CheckProgress(now);
}

}  // namespace tfscale
