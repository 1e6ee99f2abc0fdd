#include "custom_ops/transport/sockets/bundle.h"

#include <utility>

#include "custom_ops/transport/sockets/tcp_link.h"

namespace tfscale {
namespace sockets {

std::shared_ptr<Link> Bundle::Add(int socket) {
  strands_.push_back(std::make_shared<Strand>(weak_from_this()));
  links_.push_back(std::make_shared<TcpLink>(socket, peer_, name_, strands_.back()));
  ++open_;
  return links_.back();
}

void Bundle::Send(const Frame& frame, View bytes, Done written) {
  const bool large = frame.kind == Frame::kData && frame.size > kSmall;
  const size_t which = large ? next_++ % links_.size() : 0;
  links_[which]->Send(frame, std::move(bytes), std::move(written));
}

void Bundle::Close() {
  for (auto& link : links_) link->Close();
}

// What a peer has sent before it left may still be on its way over the other connections. Only who
// waits for the rest of a message waits in vain.
void Bundle::StrandLost(const std::string& why, bool amid_a_message) {
  if (--open_ > 0 && !amid_a_message) return;
  if (const auto receiver = receiver_.lock()) receiver->Lost(peer_, why);
}

std::shared_ptr<Receiver> Bundle::Strand::receiver() const {
  const auto bundle = bundle_.lock();
  return bundle == nullptr ? nullptr : bundle->receiver_.lock();
}

bool Bundle::Strand::Told(int from, const Frame& frame) {
  const auto to = receiver();
  return to != nullptr && to->Told(from, frame);
}

std::shared_ptr<Arrival> Bundle::Strand::Begins(int from, const Frame& frame) {
  const auto to = receiver();
  const auto arrival = to == nullptr ? nullptr : to->Begins(from, frame);
  awaited_ = arrival != nullptr && !arrival->discard;
  return arrival;
}

void Bundle::Strand::Ends(int from, const std::shared_ptr<Arrival>& arrival, View bytes) {
  awaited_ = false;
  if (const auto to = receiver()) to->Ends(from, arrival, std::move(bytes));
}

void Bundle::Strand::Lost(int, const std::string& why) {
  if (const auto bundle = bundle_.lock()) bundle->StrandLost(why, awaited_);
}

}  // namespace sockets
}  // namespace tfscale
