#include "custom_ops/engine/collective.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "custom_ops/engine/communicator.h"
#include "custom_ops/engine/notice.h"
#include "custom_ops/engine/numbers.h"
#include "custom_ops/engine/text.h"

namespace tfscale {
namespace {

// Parts that run at the same time. More hides more latency and holds more
// memory: at most this many parts' worth of bytes are in flight.
constexpr int kWindow = 8;

// Numbers that are summed and encoded at a time: they fit in a core's own cache.
constexpr int64_t kTile = 64 * wire::kBlock;

std::vector<Span> TilesOf(const Span& span) {
  std::vector<Span> tiles;
  for (int64_t at = 0; at < span.count; at += kTile) {
    tiles.push_back({span.first + at, std::min(kTile, span.count - at)});
  }
  return tiles;
}

int64_t WallClock() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

double Rounded(double seconds) { return std::round(seconds * 10) / 10; }

Clock::rep Now() { return Clock::now().time_since_epoch().count(); }

uint64_t Mix(uint64_t seed, uint64_t rank) {
  uint64_t h = seed + 0x9e3779b97f4a7c15u * (rank + 1);
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  return h ^ (h >> 31);
}

}  // namespace

Collective::Collective(Request request, std::shared_ptr<Communicator> communicator,
                       uint32_t generation, uint32_t execution, Done done)
    : request_(std::move(request)),
      communicator_(std::move(communicator)),
      generation_(generation),
      execution_(execution),
      data_id_(Hash(request_.name + '\n' + request_.signature)),
      name_id_(Hash(request_.name)),
      pool_(communicator_->pool()),
      began_(Clock::now()),
      began_at_(WallClock()),
      channel_(request_.open()),
      done_(std::move(done)),
      open_(request_.layout.parts()),
      last_progress_(Now()),
      awaited_(request_.program->ranks),
      untaken_(request_.program->ranks) {
  if (request_.layout.count() > 0) {
    company_ = request_.program->peers;
  } else {
    company_ = communicator_->Others();
  }
}

// ---------------------------------------------------------------------------
// Parts and steps

void Collective::Start() {
  if (request_.layout.count() == 0) return StartEmpty();
  to_activate_ = static_cast<int>(std::min<int64_t>(kWindow, request_.layout.parts()));
  ActivateNext();
}

// Nothing travels, but ranks must still agree that it is nothing: each with all
// others, so that all succeed or none.
void Collective::StartEmpty() {
  open_ = 1 + 2 * static_cast<int64_t>(company_.size());
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
    const PartPtr part = MakePart(index);
    AddResidual(*part);
    const auto& steps = request_.program->steps;
    for (int s = 0; s < static_cast<int>(steps.size()); ++s) {
      if (steps[s].receives()) PostReceive(part, s);
    }
    Drain(part);
  } while (to_activate_.fetch_sub(1) > 1);
}

Collective::PartPtr Collective::MakePart(int64_t index) {
  const Program& program = *request_.program;
  auto part = std::make_shared<Part>();
  part->index = index;
  part->running = true;  // until the receives are posted
  part->pieces.resize(program.chunks);
  part->received.resize(program.steps.size());
  part->steps_left = program.steps.size();
  part->missing = program.waits_for;
  for (size_t s = 0; s < program.steps.size(); ++s) {
    if (program.steps[s].receives()) ++part->missing[s];
    if (part->missing[s] == 0) part->ready.push_back(static_cast<int>(s));
  }
  if (!request_.codec->lossless()) {
    int64_t bytes = 0;
    for (int c = 0; c < program.chunks; ++c) {
      part->offsets.push_back(bytes);
      bytes += request_.codec->Bytes(PieceOf(*part, c).count);
    }
    part->final_bytes = pool_->Get(bytes);
  }
  return part;
}

void Collective::AddResidual(const Part& part) {
  if (request_.residual == nullptr || !request_.codec->lossless()) return;
  const bool wide = request_.element == wire::Element::kFloat64;
  for (int c = 0; c < request_.layout.chunks(); ++c) {
    const Span span = PieceOf(part, c);
    wide ? AddResidualTo<double>(span) : AddResidualTo<float>(span);
  }
}

template <typename T>
void Collective::AddResidualTo(const Span& span) {
  const T* x = reinterpret_cast<const T*>(request_.x) + span.first;
  T* y = reinterpret_cast<T*>(request_.y) + span.first;
  tfscale::Add(x, request_.residual + span.first, span.count, y);
}

// Receives are posted before they are needed, so that no message waits for a
// request to cross the network first.
void Collective::PostReceive(const PartPtr& part, int s) {
  const Step& step = request_.program->steps[s];
  const int64_t bytes = MessageBytes(*part, step);
  if (bytes == 0) return Arrived(part, s, Status());
  View into;
  if (step.kind == Kind::kKeep) into = InPlace(*part, step);
  if (into.data == nullptr) into = part->received[s] = pool_->Get(bytes);
  ++awaited_[step.peer];
  auto self = shared_from_this();
  channel_->Receive(step.peer, DataKey(*part, step), into, [self, part, s](Status status) {
    --self->awaited_[self->request_.program->steps[s].peer];
    self->last_progress_ = Now();
    self->Arrived(part, s, status);
  });
}

void Collective::Arrived(const PartPtr& part, int s, const Status& status) {
  if (over_) return;
  if (!status.ok()) {
    const std::string peer = communicator_->Describe(request_.program->steps[s].peer);
    const bool gone = status.code() == Code::kUnavailable;
    return Fail(Status(status.code(), "bucket '" + request_.name + "': " + peer +
                                          (gone ? " is gone: " : " failed: ") + status.message()));
  }
  {
    std::lock_guard<std::mutex> lock(part->mutex);
    if (--part->missing[s] > 0) return;
    part->ready.push_back(s);
    if (part->running) return;
    part->running = true;
  }
  Drain(part);
}

void Collective::Drain(const PartPtr& part) {
  const Program& program = *request_.program;
  std::unique_lock<std::mutex> lock(part->mutex);
  bool finished = part->steps_left == 0;
  for (size_t next = 0; !over_ && next < part->ready.size(); ++next) {
    const int s = part->ready[next];
    lock.unlock();
    Execute(part, s);
    lock.lock();
    for (int later : program.unlocks[s]) {
      if (--part->missing[later] == 0) part->ready.push_back(later);
    }
    finished = --part->steps_left == 0;
  }
  part->ready.clear();
  part->running = false;
  lock.unlock();
  if (!finished || over_) return;
  if (to_activate_.fetch_add(1) == 0) ActivateNext();
  Closed();
}

void Collective::Execute(const PartPtr& part, int s) {
  const Step& step = request_.program->steps[s];
  switch (step.kind) {
    case Kind::kSend:
      return Send(part, step);
    case Kind::kAdd:
      return Add(part.get(), s);
    case Kind::kFinalise:
      return Finalise(part.get(), step);
    case Kind::kKeep:
      return Keep(part.get(), s);
  }
}

// A send does not wait until the peer has taken the bytes: a peer that died
// never takes them. The collective as a whole does wait, so that no rank runs
// ahead without bound.
void Collective::Send(const PartPtr& part, const Step& step) {
  const int64_t bytes = MessageBytes(*part, step);
  if (bytes == 0) return;
  const View view = step.final ? InPlace(*part, step) : View();
  ++open_;
  ++untaken_[step.peer];
  auto self = shared_from_this();
  const int to = step.peer;
  channel_->Post(to, DataKey(*part, step), view.data != nullptr ? view : Partial(part.get(), step),
                 [self, to, bytes](Status status) {
                   --self->untaken_[to];
                   if (!status.ok()) {
                     return self->Fail(Status(status.code(), self->About(to) + status.message()));
                   }
                   self->sent_ += bytes;
                   self->last_progress_ = Now();
                   self->Closed();
                 });
}

// A lossless wire adds in y. Sums that are to be encoded are not made before
// then: see EncodePiece.
void Collective::Add(Part* part, int s) {
  const Step& step = request_.program->steps[s];
  const wire::Codec& codec = *request_.codec;
  const View received = std::move(part->received[s]);
  const uint8_t* bytes = received.data;
  for (int c = step.first; c < step.last; ++c) {
    const Span span = PieceOf(*part, c);
    Piece& piece = part->pieces[c];
    if (codec.lossless()) {
      codec.DecodeAdd(bytes, span.count, Base(*part, c), Y(*part, c));
      piece.in_y = true;
    } else {
      piece.addends.push_back({bytes, received.owner});
    }
    bytes += codec.Bytes(span.count);
  }
}

void Collective::Finalise(Part* part, const Step& step) {
  const bool shared = request_.program->goal != Goal::kReduceScatter;
  for (int c = step.first; c < step.last; ++c) {
    if (request_.codec->lossless()) {
      FinishInY(part, c);
    } else if (shared) {
      EncodePiece(part, c, part->final_bytes.data + part->offsets[c], /*final=*/true);
    } else {
      KeepExact(part, c);
    }
    part->pieces[c].in_y = true;
    NoteFinite(*part, c);
  }
}

void Collective::FinishInY(Part* part, int c) {
  const Span span = PieceOf(*part, c);
  const uint8_t* base = Base(*part, c);
  uint8_t* y = Y(*part, c);
  if (Divisor() > 1 && request_.element == wire::Element::kFloat64) {
    Divide(reinterpret_cast<const double*>(base), span.count, static_cast<double>(Divisor()),
           reinterpret_cast<double*>(y));
  } else if (Divisor() > 1) {
    Divide(reinterpret_cast<const float*>(base), span.count, static_cast<float>(Divisor()),
           reinterpret_cast<float*>(y));
  } else if (base != y) {
    std::memcpy(y, base, span.count * request_.codec->element_bytes());
  }
}

// Nobody else needs this sum, so it is not rounded to the wire, and nothing is lost.
void Collective::KeepExact(Part* part, int c) {
  const View scratch = pool_->Get(kTile * sizeof(float));
  for (const Span& tile : TilesOf(PieceOf(*part, c))) {
    const float* sum = Sum(*part, c, tile, reinterpret_cast<float*>(scratch.data), Divisor());
    std::copy_n(sum, tile.count, reinterpret_cast<float*>(request_.y) + tile.first);
    if (request_.new_residual) std::fill_n(request_.new_residual + tile.first, tile.count, 0.0f);
  }
  part->pieces[c].addends.clear();
}

// Sums and encodes tile by tile: a tile stays in the cache from the first addend
// to the last byte, and y is written once, with what the final bytes decode to.
void Collective::EncodePiece(Part* part, int c, uint8_t* bytes, bool final) {
  const wire::Codec& codec = *request_.codec;
  const int divisor = final ? Divisor() : 1;
  const View scratch = pool_->Get(kTile * sizeof(float));
  for (const Span& tile : TilesOf(PieceOf(*part, c))) {
    const float* sum = Sum(*part, c, tile, reinterpret_cast<float*>(scratch.data), divisor);
    codec.Encode(sum, tile.count, bytes, RoundingAt(tile.first));
    KeepLoss(bytes, sum, tile, static_cast<float>(divisor));
    if (final) {
      codec.Decode(bytes, tile.count, reinterpret_cast<float*>(request_.y) + tile.first);
    }
    bytes += codec.Bytes(tile.count);
  }
  part->pieces[c].addends.clear();
}

// This rank's numbers, its residual and all that it received, over `divisor`:
// in x itself if that is all, else in `scratch`.
const float* Collective::Sum(const Part& part, int c, const Span& tile, float* scratch,
                             int divisor) const {
  const wire::Codec& codec = *request_.codec;
  const float* sum = reinterpret_cast<const float*>(request_.x) + tile.first;
  if (request_.residual != nullptr) {
    tfscale::Add(sum, request_.residual + tile.first, tile.count, scratch);
    sum = scratch;
  }
  const int64_t offset = codec.Bytes(tile.first - PieceOf(part, c).first);
  for (const Addend& addend : part.pieces[c].addends) {
    codec.DecodeAdd(addend.bytes + offset, tile.count, sum, scratch);
    sum = scratch;
  }
  if (divisor > 1) {
    Divide(sum, tile.count, static_cast<float>(divisor), scratch);
    sum = scratch;
  }
  return sum;
}

int Collective::Divisor() const { return request_.mean ? request_.program->ranks : 1; }

void Collective::Keep(Part* part, int s) {
  const Step& step = request_.program->steps[s];
  const bool in_place = part->received[s].data == nullptr;
  const bool decoded = in_place && request_.codec->lossless();
  const uint8_t* bytes = in_place && !decoded ? part->final_bytes.data + part->offsets[step.first]
                                              : part->received[s].data;
  for (int c = step.first; c < step.last; ++c) {
    const Span span = PieceOf(*part, c);
    if (!decoded) {
      request_.codec->Decode(bytes, span.count, Y(*part, c));
      bytes += request_.codec->Bytes(span.count);
    }
    part->pieces[c].in_y = true;
    NoteFinite(*part, c);
  }
  part->received[s] = View();
}

// One more part finished or message taken.
void Collective::Closed() {
  if (--open_ == 0) Succeed();
}

// ---------------------------------------------------------------------------
// Bytes

Span Collective::PieceOf(const Part& part, int chunk) const {
  return request_.layout.piece(part.index, chunk);
}

uint8_t* Collective::Y(const Part& part, int chunk) const {
  return request_.y + PieceOf(part, chunk).first * request_.codec->element_bytes();
}

const uint8_t* Collective::Base(const Part& part, int chunk) const {
  if (part.pieces[chunk].in_y || request_.residual != nullptr) return Y(part, chunk);
  return request_.x + PieceOf(part, chunk).first * request_.codec->element_bytes();
}

int64_t Collective::MessageBytes(const Part& part, const Step& step) const {
  int64_t bytes = 0;
  for (int c = step.first; c < step.last; ++c) {
    bytes += request_.codec->Bytes(PieceOf(part, c).count);
  }
  return bytes;
}

// The final bytes of these chunks where they lie, if they lie side by side:
// for a lossless wire that is the result itself.
//
// A partial sum that lies in y may be sent from there as well: the owner's
// final bytes overwrite it only after every rank's part of the sum, this one
// included, has been taken.
View Collective::InPlace(const Part& part, const Step& step) const {
  const size_t bytes = MessageBytes(part, step);
  if (!request_.codec->lossless()) {
    return {part.final_bytes.data + part.offsets[step.first], bytes, part.final_bytes.owner};
  }
  const bool partial = step.kind == Kind::kSend && !step.final;
  auto place = [&](int c) { return partial ? Base(part, c) : Y(part, c); };
  const uint8_t* end = place(step.first);
  for (int c = step.first; c < step.last; ++c) {
    const Span span = PieceOf(part, c);
    if (span.count > 0 && place(c) != end) return View();
    end += span.count * request_.codec->element_bytes();
  }
  return {const_cast<uint8_t*>(place(step.first)), bytes, request_.owner};
}

// The bytes of a partial sum, or of a lossless result that does not lie side by side.
View Collective::Partial(Part* part, const Step& step) {
  const wire::Codec& codec = *request_.codec;
  if (codec.lossless()) {
    const View view = InPlace(*part, step);
    if (view.data != nullptr) return view;
  }
  View view = pool_->Get(MessageBytes(*part, step));
  uint8_t* bytes = view.data;
  for (int c = step.first; c < step.last; ++c) {
    const Span span = PieceOf(*part, c);
    if (codec.lossless()) {
      codec.Encode(Base(*part, c), span.count, bytes, wire::Rounding());
    } else {
      EncodePiece(part, c, bytes, /*final=*/false);
    }
    bytes += codec.Bytes(span.count);
  }
  return view;
}

// A rank of a reduce-scatter does not see whether the whole sum is finite; it
// keeps the old residual where its own loss is not.
void Collective::ForgetInfinite() {
  for (int64_t i = 0; i < request_.layout.count(); ++i) {
    if (!AllFinite(request_.new_residual + i, 1)) {
      request_.new_residual[i] = request_.residual[i];
    }
  }
}

// The one rule of error feedback: whoever encodes keeps what encoding lost.
void Collective::KeepLoss(const uint8_t* bytes, const float* before, const Span& span,
                          float times) const {
  if (request_.new_residual == nullptr) return;
  float* loss = request_.new_residual + span.first;
  request_.codec->DecodeSubtract(bytes, span.count, before, loss);
  if (times != 1.0f) Scale(loss, span.count, times);
}

void Collective::NoteFinite(const Part& part, int chunk) {
  if (request_.new_residual == nullptr) return;
  const int64_t count = PieceOf(part, chunk).count;
  const uint8_t* y = Y(part, chunk);
  const bool finite = request_.element == wire::Element::kFloat64
                          ? AllFinite(reinterpret_cast<const double*>(y), count)
                          : AllFinite(reinterpret_cast<const float*>(y), count);
  if (!finite) finite_ = false;
}

wire::Rounding Collective::RoundingAt(int64_t first) const {
  wire::Rounding rounding = request_.rounding;
  rounding.seed = Mix(rounding.seed, request_.program->rank);
  rounding.first = first;
  return rounding;
}

// ---------------------------------------------------------------------------
// The end, good or bad

void Collective::Succeed() {
  if (over_.exchange(true)) return;
  if (request_.new_residual != nullptr) {
    const size_t bytes = request_.layout.count() * sizeof(float);
    const bool scatter = request_.program->goal == Goal::kReduceScatter;
    if (!finite_ && !scatter) {
      std::memcpy(request_.new_residual, request_.residual, bytes);
    } else if (request_.codec->lossless()) {
      std::memset(request_.new_residual, 0, bytes);
    } else if (scatter) {
      ForgetInfinite();
    }
  }
  Record();
  if (warned_) {
    const double seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    communicator_->patience().warn(
        Text("bucket '", request_.name, "' is done after all, after ", Rounded(seconds), " s"));
  }
  communicator_->Finished(*this);
  if (asked_) channel_->Cancel();
  done_(Status());
}

void Collective::Fail(const Status& why) {
  if (!over_) communicator_->GiveUp(generation_, why);
}

bool Collective::Stop() {
  if (over_.exchange(true)) return false;
  Record();
  channel_->Cancel();
  return true;
}

void Collective::Record() const {
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began_);
  communicator_->log().Record({request_.bucket, began_at_, began_at_ + took.count(), sent_});
}

void Collective::Report(const Status& why) { done_(why.KnownToAll()); }

// ---------------------------------------------------------------------------
// Waiting

Key Collective::DataKey(const Part& part, const Step& step) const {
  const bool final = step.kind == Kind::kAdd ? false : step.final;
  return {data_id_,
          generation_,
          execution_,
          static_cast<uint32_t>(part.index),
          final ? kFinalMessage : kPartialMessage,
          static_cast<uint32_t>(step.first),
          static_cast<uint32_t>(step.last)};
}

std::string Collective::About(int peer) const {
  return "bucket '" + request_.name + "': " + communicator_->Describe(peer) + ": ";
}

void Collective::CheckProgress(Clock::time_point now) {
  const Clock::time_point last{Clock::duration(last_progress_.load())};
  if (over_ || now < last + Communicator::kStall) return;
  if (!asked_.exchange(true)) {
    Ask();
    if (over_) channel_->Cancel();  // it ended in between, and did not know of the questions
    return;                         // however late this tick is, peers get time to answer
  }
  communicator_->Beat(generation_, now);
  const Patience& patience = communicator_->patience();
  const double seconds = std::chrono::duration<double>(now - last).count();
  if (patience.slow_after.count() > 0 && now >= last + patience.slow_after)
    WarnOfLate(now, seconds);
  if (now < last + patience.deadline) return;
  // Ranks that wait for a rank that waits leave the first word to whoever sits
  // next to the silent one.
  const bool last_word = now > last + patience.deadline + std::chrono::seconds(1);
  Expire(now, seconds, last_word);
}

void Collective::Ask() {
  Notice hello;
  hello.kind = Notice::Kind::kHello;
  hello.hash = Hash(request_.signature);
  hello.text = request_.signature;
  View mine = pool_->Get(Notice::kBytes);
  hello.Write(mine.data);
  const Key key{name_id_, generation_, execution_, 0, kHelloMessage, 0, 0};
  auto self = shared_from_this();
  for (int to : communicator_->Others()) {
    channel_->Post(to, key, mine, [self](Status status) {
      if (status.ok()) self->Introduced();
    });
  }
  for (int peer : company_) {
    View theirs = pool_->Get(Notice::kBytes);
    channel_->Receive(peer, key, theirs, [=](Status status) { self->Heard(peer, theirs, status); });
  }
  communicator_->Listen(*this);
}

void Collective::Heard(int from, const View& bytes, const Status& status) {
  if (over_ || status.code() == Code::kCancelled) return;
  Notice hello;
  std::string why;
  if (!status.ok()) {
    if (!NeedsMessagesOf(from)) return;  // it had done its part, and left
    return Fail(Status(status.code(), About(from) + "it is gone: " + status.message()));
  }
  if (!Notice::Read(bytes.data, bytes.size, Notice::Kind::kHello, &hello, &why)) {
    return Fail(Status(Code::kInvalidArgument, About(from) + why));
  }
  if (hello.hash == Hash(request_.signature)) return Introduced();
  Fail(Status(Code::kInvalidArgument,
              Text("bucket '", request_.name, "': ranks do not agree. ",
                   communicator_->Describe(communicator_->rank()), " runs ", request_.signature,
                   "; ", communicator_->Describe(from), " runs ", hello.text,
                   ". All ranks must run the same operation on the same size, type, wire and "
                   "schedule")));
}

// One hello given or heard: all that an empty collective waits for.
void Collective::Introduced() {
  if (request_.layout.count() > 0) return;
  last_progress_ = Now();
  Closed();
}

bool Collective::NeedsMessagesOf(int peer) const {
  return awaited_[peer] > 0 || untaken_[peer] > 0 || request_.layout.count() == 0;
}

std::vector<int> Collective::Needed() const {
  std::vector<int> needed;
  for (int peer : company_) {
    if (NeedsMessagesOf(peer)) needed.push_back(peer);
  }
  return needed;
}

std::vector<int> Collective::Silent(Clock::time_point now, const std::vector<int>& among) const {
  std::vector<int> silent;
  for (int peer : among) {
    if (!communicator_->IsWaiting(peer, now)) silent.push_back(peer);
  }
  return silent;
}

// Those that wait themselves give signs of life, so only who sits next to a late rank
// says anything.
void Collective::WarnOfLate(Clock::time_point now, double seconds) {
  std::string late;
  for (int peer : Silent(now, Needed())) {
    late += (late.empty() ? "" : ", ") + communicator_->Describe(peer);
  }
  if (late.empty() || warned_.exchange(true)) return;
  communicator_->patience().warn(Text("bucket '", request_.name, "' has waited ", Rounded(seconds),
                                      " s for ", late, ": no sign of life there yet"));
}

// If all that this rank needs wait themselves, the first word is theirs. The last word
// names whoever is silent, needed here or not, and if nobody is, those that are needed.
void Collective::Expire(Clock::time_point now, double seconds, bool last_word) {
  const std::vector<int> needed = Needed();
  std::vector<int> blamed = Silent(now, needed);
  if (needed.empty() || (blamed.empty() && !last_word)) return;
  if (blamed.empty()) blamed = Silent(now, communicator_->Others());
  if (blamed.empty()) blamed = needed;
  std::string who;
  for (int peer : blamed) {
    who += Text(who.empty() ? "" : ", ", communicator_->Describe(peer), " [", awaited_[peer].load(),
                " messages awaited, ", untaken_[peer].load(), " not taken, ",
                communicator_->IsWaiting(peer, now) ? "itself waiting]" : "no sign of life]");
  }
  Fail(Status(Code::kDeadlineExceeded, Text("bucket '", request_.name, "': no progress for ",
                                            Rounded(seconds), " s, waiting for ", who,
                                            ". A rank without a sign of life is stopped, stuck, "
                                            "or has not reached this collective")));
}

}  // namespace tfscale
