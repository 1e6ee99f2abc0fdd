#include "custom_ops/transport/sockets/tcp_link.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "custom_ops/transport/sockets/causality.h"
#include "custom_ops/transport/sockets/loop.h"

namespace tfscale {
namespace sockets {
namespace {

constexpr size_t kBuffer = 2 * (sizeof(Frame) + kSmall);
constexpr size_t kTurn = size_t{4} << 20;  // bytes read before others have their turn
constexpr size_t kBatch = 16;              // frames written at a time

}  // namespace

TcpLink::TcpLink(int socket, int peer, std::string name, std::weak_ptr<Receiver> receiver)
    : QueuedLink(socket, peer, std::move(receiver)), name_(std::move(name)), buffer_(kBuffer) {}

// ---------------------------------------------------------------------------
// Out

// As much as the network takes now.
bool TcpLink::Write(std::deque<Outgoing>* queue, std::vector<Done>* written) {
  bool wrote = false;
  while (!queue->empty()) {
    iovec pieces[2 * kBatch];
    int count = 0;
    for (size_t i = 0; i < std::min(kBatch, queue->size()); ++i) {
      Outgoing& out = (*queue)[i];
      const size_t header = std::min(out.done, sizeof(Frame)), body = out.done - header;
      if (header < sizeof(Frame)) {
        pieces[count++] = {reinterpret_cast<uint8_t*>(&out.frame) + header, sizeof(Frame) - header};
      }
      if (body < out.bytes.size) pieces[count++] = {out.bytes.data + body, out.bytes.size - body};
    }
    msghdr message = {};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    Sends();
    const ssize_t sent = sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) break;  // full; or broken, of which reading tells
    wrote = true;
    size_t left = static_cast<size_t>(sent);
    while (left > 0) {
      Outgoing& out = queue->front();
      const size_t all = sizeof(Frame) + out.bytes.size, now = std::min(left, all - out.done);
      out.done += now;
      left -= now;
      if (out.done < all) break;
      if (out.written != nullptr) written->push_back(std::move(out.written));
      queue->pop_front();
    }
  }
  const bool waits = !queue->empty();
  if (waits != waits_to_write_) Loop::Get().WantToWrite(this, waits_to_write_ = waits);
  return wrote;
}

// ---------------------------------------------------------------------------
// In

void TcpLink::Ready(bool read, bool write) {
  if (write) Flush();
  if (read) Read();
}

void TcpLink::Read() {
  size_t taken = 0;
  while (taken < kTurn) {
    const size_t now = arrival_ != nullptr ? ReadMessage() : ReadFrames();
    if (now == 0) return;
    taken += now;
  }
}

// How many bytes came; 0 if there are no more now, or never.
size_t TcpLink::Receive(uint8_t* to, size_t room) {
  ssize_t n;
  do {
    n = recv(socket_, to, room, MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n == 0) Lose("it closed the connection");
  if (n < 0 && errno != EAGAIN) Lose(std::strerror(errno));
  if (n > 0) HasReceived();
  return n > 0 ? static_cast<size_t>(n) : 0;
}

// Straight to where the message is to be.
size_t TcpLink::ReadMessage() {
  const size_t left = wanted_ - got_;
  const size_t now = arrival_->discard ? Receive(buffer_.data(), std::min(left, buffer_.size()))
                                       : Receive(arrival_->into.data + got_, left);
  got_ += now;
  if (now > 0 && got_ == wanted_) End(arrival_->into);
  return now;
}

size_t TcpLink::ReadFrames() {
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  const size_t now = Receive(buffer_.data() + end_, buffer_.size() - end_);
  end_ += now;
  return now > 0 && Parse() ? now : 0;
}

// What is in the buffer: whole frames, and the beginning of a message.
bool TcpLink::Parse() {
  while (arrival_ == nullptr && end_ - begin_ >= sizeof(Frame)) {
    Frame frame;
    std::memcpy(&frame, buffer_.data() + begin_, sizeof(Frame));
    begin_ += sizeof(Frame);
    const bool data = frame.kind == Frame::kData;
    if (frame.magic != Frame::kMagic || !(data ? Begin(frame) : Tell(frame))) {
      Lose("it sent what is no frame of this protocol");
      return false;
    }
    if (!data) continue;
    FindPlace();
    got_ = std::min(wanted_, end_ - begin_);
    if (!arrival_->discard) std::memcpy(arrival_->into.data, buffer_.data() + begin_, got_);
    begin_ += got_;
    if (got_ == wanted_) End(arrival_->into);
  }
  if (begin_ == end_) begin_ = end_ = 0;
  return true;
}

}  // namespace sockets
}  // namespace tfscale
