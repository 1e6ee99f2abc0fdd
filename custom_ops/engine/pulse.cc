#include "custom_ops/engine/pulse.h"

#include <cstring>
#include <utility>

namespace tfscale {
namespace {

// That it comes says all; a transport carries no empty message.
constexpr size_t kBytes = 8;

}  // namespace

Pulse::Pulse(std::vector<int> others, uint32_t generation, Clock::duration interval,
             std::shared_ptr<Channel> channel, const std::shared_ptr<BufferPool>& pool)
    : others_(std::move(others)),
      generation_(generation),
      interval_(interval),
      channel_(std::move(channel)),
      pool_(pool),
      beat_(pool->Get(kBytes)),
      peers_(others_.size() + 1) {
  std::memset(beat_.data, 0, kBytes);
}

void Pulse::Beat(Clock::time_point now) {
  if (now < next_) return;
  next_ = now + interval_;
  for (int peer : others_) {
    if (!peers_[peer].offered.exchange(true)) Offer(peer);
    if (!peers_[peer].asked.exchange(true)) Ask(peer);
  }
}

// A beat that fails is the last one: its peer is gone, or this generation is over.
void Pulse::Offer(int to) {
  auto self = shared_from_this();
  channel_->Post(to, KeyOf(peers_[to].given), beat_, [self, to](Status status) {
    if (!status.ok()) return;
    ++self->peers_[to].given;
    self->peers_[to].offered = false;
  });
}

void Pulse::Ask(int from) {
  auto self = shared_from_this();
  const View into = pool_->Get(kBytes);
  channel_->Receive(from, KeyOf(peers_[from].taken), into,
                    [self, from](Status status, const View&) {
                      if (!status.ok()) return;
                      Peer& peer = self->peers_[from];
                      peer.heard_at = Clock::now().time_since_epoch().count();
                      ++peer.taken;
                      peer.asked = false;
                    });
}

bool Pulse::HeardSince(int peer, Clock::time_point since) const {
  return peers_[peer].heard_at.load() >= since.time_since_epoch().count();
}

}  // namespace tfscale
