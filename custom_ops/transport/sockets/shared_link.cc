#include "custom_ops/transport/sockets/shared_link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "custom_ops/transport/sockets/causality.h"
#include "custom_ops/transport/sockets/loop.h"

namespace tfscale {
namespace sockets {
namespace {

constexpr uint64_t kUnit = sizeof(Frame);      // records begin at its multiples
constexpr size_t kWorthLending = 4096;         // less is copied
constexpr uint64_t kTurn = uint64_t{4} << 20;  // bytes read before others have their turn

uint64_t RoundUp(uint64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

}  // namespace

SharedLink::SharedLink(int socket, std::unique_ptr<Segment> segment, int mine, int peer,
                       std::weak_ptr<Receiver> receiver)
    : QueuedLink(socket, peer, std::move(receiver)),
      segment_(std::move(segment)),
      capacity_(segment_->ring_bytes()),
      most_(capacity_ / 4 - kUnit),
      out_(segment_->head(mine)),
      in_(segment_->head(1 - mine)),
      out_bytes_(segment_->ring(mine)),
      in_bytes_(segment_->ring(1 - mine)) {}

void SharedLink::Ring() {
  const uint8_t bell = 1;
  (void)!send(socket_, &bell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);  // full: it has rung enough
}

// ---------------------------------------------------------------------------
// Out

// As much as there is room for.
bool SharedLink::Write(std::deque<Outgoing>* queue, std::vector<Done>* written) {
  const uint64_t before = written_;
  while (!queue->empty()) {
    Outgoing& out = queue->front();
    const size_t now = std::min<size_t>(out.bytes.size - out.done, most_);
    const uint64_t bytes = kUnit + RoundUp(now);
    uint8_t* record = RoomOrWait(bytes);
    if (record == nullptr) break;
    Frame frame = out.frame;
    if (out.done > 0) frame.kind = Frame::kMore;
    frame.here = now;
    std::memcpy(record, &frame, sizeof(frame));
    if (now > 0) std::memcpy(record + kUnit, out.bytes.data + out.done, now);
    Publish(bytes);
    out.done += now;
    if (out.done < out.bytes.size) continue;
    if (out.written != nullptr) written->push_back(std::move(out.written));
    queue->pop_front();
  }
  return written_ != before;
}

// If there is none, the reader rings once it has freed some.
uint8_t* SharedLink::RoomOrWait(size_t bytes) {
  uint8_t* room = Room(bytes);
  if (room != nullptr) return room;
  out_->writer_waits.store(1);
  return Room(bytes);
}

uint8_t* SharedLink::Room(size_t bytes) {
  const uint64_t used = written_ - out_->freed.load();
  const uint64_t at = written_ % capacity_, tail = capacity_ - at;
  const uint64_t skipped = bytes > tail ? tail : 0;
  if (used > capacity_ || capacity_ - used < skipped + bytes) return nullptr;
  HasReceived();  // that what lay there was read
  if (skipped == 0) return out_bytes_ + at;
  Frame skip;
  skip.kind = Frame::kSkip;
  std::memcpy(out_bytes_ + at, &skip, sizeof(skip));
  written_ += skipped;
  return out_bytes_;
}

void SharedLink::Publish(size_t bytes) {
  written_ += bytes;
  Sends();
  out_->written.store(written_);
  if (out_->reader_sleeps.load() != 0 && out_->reader_sleeps.exchange(0) != 0) Ring();
}

// ---------------------------------------------------------------------------
// In

void SharedLink::Ready(bool read, bool) {
  if (!read) return;
  uint8_t bells[4096];  // of more, the progress thread hears in its next turn
  ssize_t n;
  do {
    n = recv(socket_, bells, sizeof(bells), MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n > 0 || (n < 0 && errno == EAGAIN)) return;
  const std::string why = n == 0 ? "it closed the connection" : std::strerror(errno);
  const uint64_t before = read_;
  while (read_ - before < capacity_ && Read()) {  // what it wrote before; no more fits
  }
  Lose(why);
}

bool SharedLink::Poll() {
  const bool wrote = Flush();
  return Read() || wrote;
}

void SharedLink::Sleeps(bool asleep) { in_->reader_sleeps.store(asleep ? 1 : 0); }

// True if there was something.
bool SharedLink::Read() {
  const uint64_t before = read_;
  while (read_ - before < kTurn) {
    const uint64_t written = in_->written.load(), there = written - read_;
    if (there == 0) break;
    if (there > capacity_ || written - freed_ > capacity_) {
      Lose("it wrote where there was no room in shared memory");
      return false;
    }
    HasReceived();
    const uint64_t at = read_ % capacity_, tail = capacity_ - at;
    Frame frame;
    std::memcpy(&frame, in_bytes_ + at, sizeof(frame));
    const bool skips = frame.kind == Frame::kSkip;
    const uint64_t bytes = skips ? tail : kUnit + RoundUp(std::min(frame.here, capacity_));
    if (frame.magic != Frame::kMagic || bytes > std::min(there, tail)) {
      Lose("it wrote what is no frame of this protocol into shared memory");
      return false;
    }
    read_ += bytes;
    const uint64_t number = Hold(read_);
    if (skips) {
      Release(number);
    } else if (!ReadRecord(frame, in_bytes_ + at + kUnit, number)) {
      Lose("it wrote what is no frame of this protocol into shared memory");
      return false;
    }
  }
  return read_ != before;
}

bool SharedLink::ReadRecord(const Frame& frame, uint8_t* body, uint64_t number) {
  const bool begins = frame.kind == Frame::kData;
  if (begins && (arrival_ != nullptr || !Begin(frame))) return false;
  if (begins || frame.kind == Frame::kMore) {
    if (arrival_ == nullptr || frame.here > wanted_ - got_) return false;
    const bool lendable = arrival_->into.data == nullptr && frame.here == wanted_ &&
                          frame.here >= kWorthLending && !arrival_->discard;
    if (lendable && lent_ + frame.here <= capacity_ / 2) {
      Lend(body, number);
      return true;
    }
    FindPlace();
    if (!arrival_->discard) std::memcpy(arrival_->into.data + got_, body, frame.here);
    got_ += frame.here;
    Release(number);
    if (got_ == wanted_) End(arrival_->into);
    return true;
  }
  Release(number);
  return frame.here == 0 && Tell(frame);
}

// The receiver reads the message where it lies.
void SharedLink::Lend(uint8_t* body, uint64_t number) {
  {
    std::lock_guard<std::mutex> lock(held_mutex_);
    held_[number - first_held_].lent = wanted_;
    lent_ += wanted_;
  }
  auto self = shared_from_this();
  End({body, wanted_,
       std::shared_ptr<void>(body, [self, number](void*) { self->Release(number); })});
}

// ---------------------------------------------------------------------------
// Records that are still looked at

uint64_t SharedLink::Hold(uint64_t end) {
  std::lock_guard<std::mutex> lock(held_mutex_);
  held_.push_back({end, 0, false});
  return first_held_ + held_.size() - 1;
}

void SharedLink::Release(uint64_t number) {
  {
    std::lock_guard<std::mutex> lock(held_mutex_);
    Held& held = held_[number - first_held_];
    held.released = true;
    lent_ -= held.lent;
    if (!held_.front().released) return;
    uint64_t end = 0;
    while (!held_.empty() && held_.front().released) {
      end = held_.front().end;
      held_.pop_front();
      ++first_held_;
    }
    Sends();
    freed_ = end;  // first: the other side may write as soon as it sees that it may
    in_->freed.store(end);
  }
  if (in_->writer_waits.load() != 0 && in_->writer_waits.exchange(0) != 0) Ring();
}

}  // namespace sockets
}  // namespace tfscale
