#include "custom_ops/transport/sockets/endpoint.h"

#include <cstring>
#include <utility>

#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/engine/text.h"
#include "custom_ops/transport/sockets/crew.h"

namespace tfscale {
namespace sockets {
namespace {

constexpr const char* kLeft = "it has left its group";
constexpr const char* kHasLeft = "this rank has left its group";

Status Cancelled() { return Status(Code::kCancelled, "cancelled"); }
Status UsedTwice() { return Status(Code::kInternal, "a key was used twice"); }
Status Gone(const std::string& why) { return Status(Code::kUnavailable, why); }

Status Differ(size_t expected, size_t got) {
  return Status(Code::kInternal,
                Text("sizes differ: expected ", expected, " bytes, the peer has ", got));
}

// Gives a receiver a small message that came before it waited.
void Give(const Taken& done, const View& into, View bytes) {
  if (into.size != bytes.size) return done(Differ(into.size, bytes.size), View());
  if (into.data == nullptr) return done(Status(), std::move(bytes));
  std::memcpy(into.data, bytes.data, bytes.size);
  done(Status(), into);
}

// Takes all out that belong to a channel.
template <typename Map, typename Out>
void TakeOut(Map* from, const Channel* channel, Out* taken) {
  for (auto it = from->begin(); it != from->end();) {
    if (it->second.channel != channel) {
      ++it;
      continue;
    }
    taken->push_back(std::move(*it));
    it = from->erase(it);
  }
}

}  // namespace

bool Address::operator==(const Address& other) const {
  return peer == other.peer && std::memcmp(&key, &other.key, sizeof(key)) == 0;
}

size_t AddressHash::operator()(const Address& address) const {
  const Key& k = address.key;
  uint64_t h = k.collective + static_cast<uint64_t>(address.peer);
  for (uint64_t part : {uint64_t{k.generation} << 32 | k.execution, uint64_t{k.part} << 32 | k.kind,
                        uint64_t{k.first} << 32 | k.last}) {
    h = (h ^ part) * 0x9e3779b97f4a7c15u;
    h ^= h >> 32;
  }
  return h;
}

class Endpoint::SocketChannel : public Channel {
 public:
  explicit SocketChannel(std::shared_ptr<Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}

  void Post(int to, const Key& key, View bytes, Done done) override {
    if (cancelled_) return done(Cancelled());
    endpoint_->Post(to, key, {std::move(bytes), std::move(done), this});
    if (cancelled_) endpoint_->Cancel(this);  // Cancel() may have come in between
  }
  void Receive(int from, const Key& key, View into, Taken done) override {
    if (cancelled_) return done(Cancelled(), View());
    endpoint_->Receive(from, key, {std::move(into), std::move(done), this});
    if (cancelled_) endpoint_->Cancel(this);
  }
  void Cancel() override {
    cancelled_ = true;
    endpoint_->Cancel(this);
  }
  bool awaits_for_free() const override { return true; }

 private:
  const std::shared_ptr<Endpoint> endpoint_;
  std::atomic<bool> cancelled_{false};
};

std::shared_ptr<Channel> Endpoint::Open() {
  return std::make_shared<SocketChannel>(shared_from_this());
}

Endpoint::~Endpoint() { Leave(); }

void Endpoint::Leave() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    left_ = true;
  }
  const int ranks = static_cast<int>(ways_.size());
  for (int peer = 0; peer < ranks; ++peer) {
    if (ways_[peer] != nullptr) ways_[peer]->Close();
    if (const auto neighbour = neighbours_[peer].lock()) neighbour->Lost(rank_, kLeft);
  }
  for (int peer = 0; peer < ranks; ++peer) Lost(peer, kHasLeft);
}

std::string Endpoint::Way(int peer) const {
  return ways_[peer] == nullptr ? kWithinProcess : ways_[peer]->Name();
}

void Endpoint::Tell(int peer, uint32_t kind, const Key& key, size_t size, uint64_t number) {
  Frame frame;
  frame.kind = kind;
  frame.key = key;
  frame.size = size;
  frame.number = number;
  ways_[peer]->Send(frame, View(), nullptr);
}

// ---------------------------------------------------------------------------
// Out

void Endpoint::Post(int to, const Key& key, Posted message) {
  const Address address{to, key};
  Frame frame;
  frame.key = key;
  frame.size = message.bytes.size;
  std::unique_lock<std::mutex> lock(mutex_);
  if (left_ || !lost_[to].empty()) {
    const Status gone = Gone(left_ ? kHasLeft : lost_[to]);
    lock.unlock();
    return message.done(gone);
  }
  if (ways_[to] == nullptr) {
    lock.unlock();
    const auto neighbour = neighbours_[to].lock();
    if (neighbour == nullptr) return message.done(Gone(kLeft));
    return neighbour->Offer(rank_, key, std::move(message));
  }
  if (message.bytes.size <= kSmall) {
    frame.number = next_number_++;
    const View bytes = message.bytes;
    small_[frame.number] = {std::move(message), address};
    lock.unlock();
    return ways_[to]->Send(frame, bytes, nullptr);
  }
  if (wanted_.count(address) > 0) {
    ForgetWanted(address);
    lock.unlock();
    return SendLarge(address, std::move(message));
  }
  if (large_.count(address) > 0) {
    lock.unlock();
    return message.done(UsedTwice());
  }
  large_.emplace(address, std::move(message));
}

void Endpoint::SendLarge(const Address& address, Posted message) {
  Frame frame;
  frame.key = address.key;
  frame.size = message.bytes.size;
  ways_[address.peer]->Send(frame, std::move(message.bytes), std::move(message.done));
}

// ---------------------------------------------------------------------------
// In

void Endpoint::Receive(int from, const Key& key, Awaited awaited) {
  const Address address{from, key};
  const bool ask = ways_[from] != nullptr && awaited.into.size > kSmall;
  const size_t size = awaited.into.size;
  bool waits = false;
  Status refused;
  Posted offer;
  Early early;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto offered = offers_.find(address);
    auto came = early_.find(address);
    if (offered != offers_.end()) {
      offer = std::move(offered->second);
      offers_.erase(offered);
    } else if (came != early_.end()) {
      early = TakeEarly(came);
    } else if (!lost_[from].empty()) {
      refused = Gone(lost_[from]);
    } else if (awaited_.count(address) > 0) {
      refused = UsedTwice();
    } else {
      awaited_.emplace(address, std::move(awaited));
      waits = true;
    }
  }
  if (waits && ask) Tell(from, Frame::kWant, key, size, 0);
  if (waits) return;
  if (!refused.ok()) return awaited.done(refused, View());
  if (offer.done != nullptr) return HandOver(std::move(offer), std::move(awaited));
  Tell(from, Frame::kTaken, key, 0, early.number);
  Give(awaited.done, awaited.into, std::move(early.bytes));
}

std::shared_ptr<Arrival> Endpoint::Begins(int from, const Frame& frame) {
  auto message = std::make_shared<Message>();
  message->address = {from, frame.key};
  message->small = frame.size <= kSmall;
  message->number = frame.number;
  Taken refused;
  size_t expected = 0;
  std::string misdeed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto waiting = awaited_.find(message->address);
    if (waiting != awaited_.end()) {
      Awaited& awaited = waiting->second;
      if (awaited.into.size == frame.size) {
        message->into = awaited.into;
        message->done = std::move(awaited.done);
        message->channel = awaited.channel;
        arriving_[message->address] = message;
      } else {
        message->discard = true;
        expected = awaited.into.size;
        refused = std::move(awaited.done);
      }
      awaited_.erase(waiting);
    } else if (message->small && early_.count(message->address) == 0) {
      message->early = true;
      message->into.size = frame.size;
      if (kept_[from].early + kEarlyCost + frame.size > kMostEarly) {
        misdeed = Text("it sent more messages that nobody waits for than fit into ",
                       kMostEarly >> 20, " MiB");
      }
    } else {
      message->discard = true;  // it was cancelled, or has come before
    }
  }
  if (!misdeed.empty()) {
    Expel(from, misdeed);
    return nullptr;
  }
  if (refused != nullptr) refused(Differ(expected, frame.size), View());
  if (message->early) message->into = BufferPool::OfProcess().Get(frame.size);
  return message;
}

void Endpoint::Ends(int from, const std::shared_ptr<Arrival>& arrival, View bytes) {
  auto& message = static_cast<Message&>(*arrival);
  if (message.discard) return;
  Taken done;
  View into;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (message.early) {  // perhaps not any more
      auto waiting = awaited_.find(message.address);
      if (waiting == awaited_.end()) {
        const size_t cost = kEarlyCost + bytes.size;
        const bool first =
            early_.try_emplace(message.address, Early{std::move(bytes), message.number}).second;
        if (first) kept_[from].early += cost;
        return;
      }
      done = std::move(waiting->second.done);
      into = waiting->second.into;
      awaited_.erase(waiting);
    } else {
      if (arriving_.erase(message.address) == 0) return;  // it was cancelled
      done = std::move(message.done);
    }
  }
  if (message.small) Tell(from, Frame::kTaken, message.address.key, 0, message.number);
  if (message.early) return Give(done, into, std::move(bytes));
  done(Status(), std::move(bytes));
}

bool Endpoint::Told(int from, const Frame& frame) {
  const Address address{from, frame.key};
  switch (frame.kind) {
    case Frame::kWant:
      return Wanted(address);
    case Frame::kTaken:
      return TakenBy(from, frame.number);
    case Frame::kUnwant: {
      std::lock_guard<std::mutex> lock(mutex_);
      ForgetWanted(address);
      return true;
    }
    case Frame::kWithdraw: {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto early = early_.find(address);
      if (early != early_.end() && early->second.number == frame.number) TakeEarly(early);
      return true;
    }
    default:
      return false;
  }
}

bool Endpoint::Wanted(const Address& address) {
  Posted message;
  bool too_many = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto posted = large_.find(address);
    if (posted != large_.end()) {
      message = std::move(posted->second);
      large_.erase(posted);
    } else {
      too_many = kept_[address.peer].wanted == kMostWanted;
      if (!too_many && wanted_.insert(address).second) ++kept_[address.peer].wanted;
    }
  }
  if (too_many) {
    Expel(address.peer,
          Text("it asked for more than ", kMostWanted, " messages that nobody has sent"));
  }
  if (message.done != nullptr) SendLarge(address, std::move(message));
  return !too_many;
}

// Under the lock.
void Endpoint::ForgetWanted(const Address& address) {
  kept_[address.peer].wanted -= wanted_.erase(address);
}

// Likewise.
Endpoint::Early Endpoint::TakeEarly(ByAddress<Early>::iterator early) {
  const Early taken = std::move(early->second);
  kept_[early->first.peer].early -= kEarlyCost + taken.bytes.size;
  early_.erase(early);
  return taken;
}

bool Endpoint::TakenBy(int peer, uint64_t number) {
  Done done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto message = small_.find(number);
    if (message == small_.end()) return true;  // withdrawn meanwhile
    if (message->second.address.peer != peer) return false;
    done = std::move(message->second.done);
    small_.erase(message);
  }
  done(Status());
  return true;
}

// ---------------------------------------------------------------------------
// Ranks of one process

void Endpoint::Offer(int from, const Key& key, Posted message) {
  const Address address{from, key};
  Awaited awaited;
  bool twice = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto waiting = awaited_.find(address);
    if (waiting != awaited_.end()) {
      awaited = std::move(waiting->second);
      awaited_.erase(waiting);
    } else if (!(twice = offers_.count(address) > 0)) {
      offers_.emplace(address, std::move(message));
      return;
    }
  }
  if (twice) return message.done(UsedTwice());
  HandOver(std::move(message), std::move(awaited));
}

// Where the receiver has no place for the bytes, it gets them where they lie.
void Endpoint::HandOver(Posted from, Awaited to) {
  const size_t size = from.bytes.size;
  Crew::Get().Run(size, [from = std::move(from), to = std::move(to), size] {
    if (size != to.into.size) {
      const Status differ = Differ(to.into.size, size);
      from.done(differ);
      return to.done(differ, View());
    }
    if (to.into.data == nullptr) return to.done(Status(), Lent(from.bytes, from.done));
    std::memcpy(to.into.data, from.bytes.data, size);
    from.done(Status());
    to.done(Status(), to.into);
  });
}

void Endpoint::CancelOffers(const Channel* channel) {
  std::vector<std::pair<const Address, Posted>> offers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TakeOut(&offers_, channel, &offers);
  }
  for (auto& offer : offers) offer.second.done(Cancelled());
}

// ---------------------------------------------------------------------------
// The end

void Endpoint::Cancel(const Channel* channel) {
  std::vector<std::pair<const uint64_t, Small>> small;
  std::vector<std::pair<const Address, Posted>> large;
  std::vector<std::pair<const Address, Awaited>> awaited;
  std::vector<Taken> arriving;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TakeOut(&small_, channel, &small);
    TakeOut(&large_, channel, &large);
    TakeOut(&awaited_, channel, &awaited);
    for (auto it = arriving_.begin(); it != arriving_.end();) {
      const bool hit = it->second->channel == channel;
      if (hit) arriving.push_back(std::move(it->second->done));
      it = hit ? arriving_.erase(it) : std::next(it);
    }
  }
  for (auto& entry : small) {
    const Address& address = entry.second.address;
    Tell(address.peer, Frame::kWithdraw, address.key, 0, entry.first);
    entry.second.done(Cancelled());
  }
  for (auto& entry : large) entry.second.done(Cancelled());
  for (auto& entry : awaited) {
    const int from = entry.first.peer;
    const bool asked = ways_[from] != nullptr && entry.second.into.size > kSmall;
    if (asked) Tell(from, Frame::kUnwant, entry.first.key, 0, 0);
    entry.second.done(Cancelled(), View());
  }
  for (auto& done : arriving) done(Cancelled(), View());
  for (auto& weak : neighbours_) {
    if (const auto neighbour = weak.lock()) neighbour->CancelOffers(channel);
  }
}

// A peer that breaks the protocol. What it has sent is worth nothing.
void Endpoint::Expel(int peer, const std::string& why) {
  Lost(peer, why);
  ways_[peer]->Close();
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = early_.begin(); it != early_.end();) {
    it = it->first.peer == peer ? early_.erase(it) : std::next(it);
  }
  kept_[peer].early = 0;
}

void Endpoint::Lost(int peer, const std::string& why) {
  std::vector<Done> posted;
  std::vector<Taken> awaited;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!lost_[peer].empty()) return;
    lost_[peer] = why;
    for (auto it = small_.begin(); it != small_.end();) {
      const bool hit = it->second.address.peer == peer;
      if (hit) posted.push_back(std::move(it->second.done));
      it = hit ? small_.erase(it) : std::next(it);
    }
    const auto take = [peer](auto* from, auto keep) {
      for (auto it = from->begin(); it != from->end();) {
        const bool hit = it->first.peer == peer;
        if (hit) keep(it->second);
        it = hit ? from->erase(it) : std::next(it);
      }
    };
    take(&large_, [&](Posted& one) { posted.push_back(std::move(one.done)); });
    take(&awaited_, [&](Awaited& one) { awaited.push_back(std::move(one.done)); });
    take(&arriving_,
         [&](std::shared_ptr<Message>& one) { awaited.push_back(std::move(one->done)); });
    for (auto it = wanted_.begin(); it != wanted_.end();) {
      it = it->peer == peer ? wanted_.erase(it) : std::next(it);
    }
    kept_[peer].wanted = 0;
  }
  for (auto& done : posted) done(Gone(why));
  for (auto& done : awaited) done(Gone(why), View());
}

}  // namespace sockets
}  // namespace tfscale
