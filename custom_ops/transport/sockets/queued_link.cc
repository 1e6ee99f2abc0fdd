#include "custom_ops/transport/sockets/queued_link.h"

#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/transport/sockets/loop.h"

namespace tfscale {
namespace sockets {
namespace {

Status Closed() { return Status(Code::kUnavailable, "the connection is closed"); }

}  // namespace

QueuedLink::~QueuedLink() { close(socket_); }

void QueuedLink::Close() {
  std::deque<Outgoing> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    dropped.swap(outgoing_);
  }
  shutdown(socket_, SHUT_RDWR);
  Loop::Get().Remove(this);
  for (auto& out : dropped) {
    if (out.written != nullptr) out.written(Closed());
  }
}

void QueuedLink::Lose(const std::string& why) {
  Close();
  if (const auto receiver = receiver_.lock()) receiver->Lost(peer_, why);
}

void QueuedLink::Send(const Frame& frame, View bytes, Done written) {
  std::vector<Done> all_written;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) {
      outgoing_.push_back({frame, std::move(bytes), std::move(written)});
      written = nullptr;
      if (outgoing_.size() == 1) Write(&outgoing_, &all_written);
    }
  }
  if (written != nullptr) written(Closed());
  for (auto& done : all_written) done(Status());
}

bool QueuedLink::Flush() {
  bool wrote = false;
  std::vector<Done> written;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock() && !closed_) wrote = Write(&outgoing_, &written);
  }
  for (auto& done : written) done(Status());
  return wrote;
}

bool QueuedLink::Tell(const Frame& frame) {
  const auto receiver = receiver_.lock();
  return receiver != nullptr && receiver->Told(peer_, frame);
}

bool QueuedLink::Begin(const Frame& frame) {
  const auto receiver = receiver_.lock();
  if (receiver != nullptr) arrival_ = receiver->Begins(peer_, frame);
  wanted_ = frame.size;
  got_ = 0;
  return arrival_ != nullptr;
}

void QueuedLink::FindPlace() {
  if (arrival_->into.data != nullptr || arrival_->discard) return;
  arrival_->into = BufferPool::OfProcess().Get(wanted_);
}

void QueuedLink::End(View bytes) {
  const auto arrival = std::move(arrival_);
  arrival_ = nullptr;
  const auto receiver = receiver_.lock();
  if (receiver != nullptr) receiver->Ends(peer_, arrival, std::move(bytes));
}

}  // namespace sockets
}  // namespace tfscale
