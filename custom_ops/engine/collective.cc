#include "custom_ops/engine/collective.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "custom_ops/engine/communicator.h"

namespace tfscale {
namespace {

// Parts that run at the same time. More hides more latency and holds more
// memory: at most this many parts' worth of bytes are in flight.
constexpr int kWindow = 8;

int64_t WallClock() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

// A ragged route that is empty here is none for others, who expect nothing of this rank.
bool Empty(const Request& request) { return request.layout.count() == 0 && !request.ragged; }

// With whom it exchanges anything. An empty collective is a matter of all ranks, but an empty route
// is one of those that it leads through: others may never come.
std::vector<int> Company(const Request& request, const Communicator& communicator) {
  const bool of_all = Empty(request) && request.program->goal != Goal::kRoute;
  return of_all ? communicator.Others() : request.program->peers;
}

}  // namespace

Collective::Collective(Request request, std::shared_ptr<Communicator> communicator,
                       uint32_t generation, uint32_t execution, Done done)
    : request_(std::move(request)),
      communicator_(std::move(communicator)),
      keys_(request_, generation, execution),
      began_(Clock::now()),
      began_at_(WallClock()),
      channel_(request_.open()),
      done_(std::move(done)),
      residuals_(request_),
      reduction_(request_, &residuals_, communicator_->pool().get()),
      progress_(request_.program->ranks, Company(request_, *communicator_), Empty(request_)),
      diagnosis_(request_, *communicator_, progress_),
      open_(request_.layout.parts()) {}

// ---------------------------------------------------------------------------
// Parts and moves

void Collective::Start() {
  if (channel_->awaits_for_free()) communicator_->Listen(*this);
  if (Empty(request_)) return StartEmpty();
  to_activate_ = static_cast<int>(std::min<int64_t>(kWindow, request_.layout.parts()));
  ActivateNext();
}

// Nothing travels, but ranks must still agree that it is nothing: each with all
// others that take part, so that all succeed or none.
void Collective::StartEmpty() {
  open_ = 1 + 2 * static_cast<int64_t>(progress_.company().size());
  asked_ = true;
  Ask();
  Closed();
}

// A finished part makes room for the next. Calls from within (a part may
// finish before its activation returns) only leave a note for the outermost.
void Collective::ActivateNext() {
  do {
    const int64_t index = next_part_.fetch_add(1);
    if (index >= request_.layout.parts() || over_) continue;
    const auto part = std::make_shared<Part>(request_, index, communicator_->pool().get());
    reduction_.Begin(part->memory);
    const auto& moves = request_.program->moves;
    for (int s = 0; s < static_cast<int>(moves.size()); ++s) {
      if (moves[s].receives()) PostReceive(part, s);
    }
    Run(part);
  } while (to_activate_.fetch_sub(1) > 1);
}

// Receives are posted before they are needed, so that no message waits for a
// request to cross the network first.
void Collective::PostReceive(const PartPtr& part, int s) {
  const Move& move = request_.program->moves[s];
  const View into = part->memory.PlaceFor(s);
  if (into.size == 0) return Arrived(part, s, Status());
  const bool in_place = into.data != nullptr;
  progress_.Awaits(move.peer);
  auto self = shared_from_this();
  const Key key = keys_.OfData(part->memory.part(), move);
  channel_->Receive(move.peer, key, into, [self, part, s, in_place](Status status, View bytes) {
    self->progress_.Came(self->request_.program->moves[s].peer);
    self->progress_.Made();
    if (!in_place) part->memory.Give(s, std::move(bytes));
    self->Arrived(part, s, status);
  });
}

void Collective::Arrived(const PartPtr& part, int s, const Status& status) {
  if (over_) return;
  if (!status.ok()) return FailBecauseOf(request_.program->moves[s].peer, status);
  if (part->agenda.Arrived(s)) Run(part);
}

void Collective::Run(const PartPtr& part) {
  const bool finished = part->agenda.Run(over_, [&](int s) { Execute(part.get(), s); });
  if (!finished || over_) return;
  if (to_activate_.fetch_add(1) == 0) ActivateNext();
  Closed();
}

void Collective::Execute(Part* part, int s) {
  const Move& move = request_.program->moves[s];
  switch (move.kind) {
    case Kind::kSend:
      return Send(part, move);
    case Kind::kAdd:
      return reduction_.Add(&part->memory, s);
    case Kind::kFinalise:
      return reduction_.Finalise(&part->memory, move);
    case Kind::kKeep:
      return reduction_.Keep(&part->memory, s);
  }
}

// A send does not wait until the peer has taken the bytes: a peer that died
// never takes them. The collective as a whole does wait, so that no rank runs
// ahead without bound.
void Collective::Send(Part* part, const Move& move) {
  const int64_t bytes = part->memory.MessageBytes(move);
  if (bytes == 0) return;
  const int to = move.peer;
  ++open_;
  progress_.Offered(to);
  auto self = shared_from_this();
  const Key key = keys_.OfData(part->memory.part(), move);
  channel_->Post(to, key, reduction_.Outgoing(&part->memory, move),
                 [self, to, bytes](Status status) {
                   self->progress_.Answered(to);
                   if (!status.ok()) return self->FailBecauseOf(to, status);
                   self->sent_ += bytes;
                   self->progress_.Made();
                   self->Closed();
                 });
}

// One more part finished or message taken.
void Collective::Closed() {
  if (--open_ == 0) Succeed();
}

// ---------------------------------------------------------------------------
// The end, good or bad

void Collective::Succeed() {
  if (over_.exchange(true)) return;
  residuals_.Settle();
  Record();
  diagnosis_.Ended(Clock::now() - began_);
  communicator_->Finished(*this);
  if (asked_) channel_->Cancel();
  done_(Status());
}

void Collective::Fail(const Status& why) {
  if (!over_) communicator_->GiveUp(*this, why);
}

void Collective::FailBecauseOf(int peer, const Status& status) {
  if (status.code() == Code::kUnavailable) {
    return Fail(communicator_->Gone(request_.name, peer, status));
  }
  Fail(Status(status.code(),
              communicator_->Describe(request_.name, peer) + " failed: " + status.message()));
}

bool Collective::Stop() {
  if (over_.exchange(true)) return false;
  Record();
  channel_->Cancel();
  return true;
}

void Collective::Report(const Status& why) { done_(why.KnownToAll()); }

void Collective::Record() const {
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began_);
  communicator_->log().Record({request_.bucket, began_at_, began_at_ + took.count(), sent_});
}

// ---------------------------------------------------------------------------
// Waiting

void Collective::CheckProgress(Clock::time_point now) {
  const Clock::time_point last = progress_.last();
  if (over_ || now < last + Communicator::kStall) return;
  if (!asked_.exchange(true)) {
    Ask();
    if (over_) channel_->Cancel();  // it ended in between, and did not know of the questions
    return;                         // however late this tick is, peers get time to answer
  }
  const Status exit = communicator_->ExitThatStalls(*this);
  if (!exit.ok()) return Fail(exit);
  communicator_->Beat(generation(), now);
  const Status verdict = diagnosis_.Judge(now, last);
  if (!verdict.ok()) Fail(verdict);
}

void Collective::Ask() {
  auto self = shared_from_this();
  diagnosis_.ExchangeHellos(keys_.OfHello(), channel_.get(),
                            [self](const Status& status) { self->Introduced(status); });
  communicator_->Listen(*this);
}

// One hello given or heard: all that an empty collective waits for.
void Collective::Introduced(const Status& status) {
  if (over_) return;
  if (!status.ok()) return Fail(status);
  if (!Empty(request_)) return;
  progress_.Made();
  Closed();
}

}  // namespace tfscale
