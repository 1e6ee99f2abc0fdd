#include "custom_ops/transport/sockets/forming.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "custom_ops/engine/text.h"
#include "custom_ops/transport/sockets/bundle.h"
#include "custom_ops/transport/sockets/connecting.h"
#include "custom_ops/transport/sockets/loop.h"
#include "custom_ops/transport/sockets/segment.h"
#include "custom_ops/transport/sockets/shared_link.h"
#include "custom_ops/transport/sockets/tcp_link.h"

namespace tfscale {
namespace sockets {
namespace {

constexpr size_t kSecret = 32;
constexpr size_t kSharedBytes = size_t{8} << 20;  // of one rank, in each direction
constexpr size_t kMostRing = size_t{4} << 20, kLeastRing = size_t{256} << 10;

// What each rank tells all others before they connect.
struct Card {
  uint32_t magic = Frame::kMagic;
  uint32_t version = kVersion;
  uint32_t choice = 0;
  int32_t port = 0;
  int32_t streams = 1;
  char host[64] = {};  // a number
  char process[16] = {}, machine[64] = {};
  char secret[kSecret] = {};  // rank 0's is the group's
};

// ... and after.
struct Verdict {
  uint32_t failed = 0;
  char why[1020] = {};
};

// How a pair that has connected may share memory.
struct Offer {
  int64_t process = 0;  // 0: it may not
  int32_t file = -1;
  uint32_t unused = 0;
  uint64_t ring_bytes = 0;
  char nonce[Segment::kNonce] = {};
};

template <typename What>
std::string BytesOf(const What& what) {
  return std::string(reinterpret_cast<const char*>(&what), sizeof(what));
}

template <size_t N>
void Put(const std::string& text, char (&into)[N]) {
  const size_t size = std::min(text.size(), N - 1);
  std::memcpy(into, text.data(), size);
  std::memset(into + size, 0, N - size);
}

template <size_t N>
std::string Get(const char (&text)[N]) {
  return Printable(text, strnlen(text, N));
}

const std::string& ThisProcess() {
  static const auto* token = new std::string(Random(sizeof(Card::process)));
  return *token;
}

std::string ThisMachine() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

// Endpoints of this process, by their group's secret and their rank.
class Neighbours {
 public:
  static Neighbours& Get() {
    static Neighbours* neighbours = new Neighbours;
    return *neighbours;
  }

  void Put(const std::string& secret, int rank, const std::shared_ptr<Endpoint>& endpoint) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = all_.begin(); it != all_.end();) {
      it = it->second.expired() ? all_.erase(it) : std::next(it);
    }
    all_[{secret, rank}] = endpoint;
  }
  std::weak_ptr<Endpoint> Find(const std::string& secret, int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    return all_[{secret, rank}];
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, std::weak_ptr<Endpoint>> all_;
};

// Tells all ranks something, and hears from all. Nothing is said or heard twice: who has waited in
// vain can wait again, for what was said stays until it is taken.
template <typename What>
class Round {
 public:
  // `number` tells rounds apart.
  Round(uint32_t number, int rank, const std::vector<std::string>& peers, const What& mine,
        const std::shared_ptr<Channel>& channel)
      : rank_(rank), peers_(peers), state_(std::make_shared<State>(peers.size(), mine)) {
    const int ranks = static_cast<int>(peers.size());
    const Key key = {0, 0, number, 0, kFormingMessage, 0, 0};
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank_) continue;
      const auto done = [state = state_, peer](const Status& status, bool heard) {
        std::lock_guard<std::mutex> lock(state->mutex);
        if (!status.ok() && state->failed.ok()) state->failed = status;
        if (heard && status.ok()) state->heard[peer] = true;
        --state->left;
        state->changed.notify_all();
      };
      auto* out = reinterpret_cast<uint8_t*>(&state_->words[rank_]);
      channel->Post(peer, key, {out, sizeof(What), state_},
                    [done](Status status) { done(status, false); });
      auto* in = reinterpret_cast<uint8_t*>(&state_->words[peer]);
      const std::string about = Text("rank ", peer, " (", peers_[peer], "): ");
      channel->Receive(
          peer, key, {in, sizeof(What), state_}, [done, about](const Status& status, const View&) {
            done(status.ok() ? status : Status(status.code(), about + status.message()), true);
          });
    }
  }

  // The words of all ranks, by rank.
  Status Wait(Clock::time_point until, std::vector<What>* words) const {
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->changed.wait_until(lock, until,
                               [&] { return state_->left == 0 || !state_->failed.ok(); });
    if (!state_->failed.ok()) return state_->failed;
    if (state_->left == 0) {
      *words = state_->words;
      return Status();
    }
    std::string silent;
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_ || state_->heard[peer]) continue;
      silent += Text(silent.empty() ? "" : ", ", "rank ", peer, " (", peers_[peer], ")");
    }
    return Status(
        Code::kDeadlineExceeded,
        "no word in time of " + (silent.empty() ? std::string("who has taken it") : silent));
  }

  // Whether Wait() would wait.
  bool open() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->left > 0 && state_->failed.ok();
  }

 private:
  struct State {
    State(size_t ranks, const What& mine)
        : left(2 * (static_cast<int>(ranks) - 1)), words(ranks, mine), heard(ranks, false) {}

    std::mutex mutex;
    std::condition_variable changed;
    int left;
    Status failed;
    std::vector<What> words;
    std::vector<bool> heard;
  };

  const int rank_;
  const std::vector<std::string>& peers_;
  const std::shared_ptr<State> state_;
};

// All that one rank does to join.
class Forming {
 public:
  Forming(int rank, const std::vector<std::string>& peers, const Settings& settings)
      : rank_(rank),
        ranks_(static_cast<int>(peers.size())),
        peers_(peers),
        settings_(settings),
        endpoint_(std::make_shared<Endpoint>(rank, ranks_)) {}

  Card MakeCard() {
    Card card;
    card.choice = static_cast<uint32_t>(settings_.choice);
    card.streams = settings_.streams;
    std::memcpy(card.process, ThisProcess().data(), sizeof(card.process));
    Put(ThisMachine(), card.machine);
    std::memcpy(card.secret, Random(kSecret).data(), kSecret);
    if (settings_.choice == Choice::kOther || settings_.host.empty()) return card;
    Place place;
    listening_ =
        Listen(settings_.host, settings_.first_port, settings_.last_port, &listener_, &place);
    Put(place.host, card.host);
    card.port = place.port;
    return card;
  }

  // Whether all ranks speak of the same.
  Status Check(const std::vector<Card>& cards) const {
    static const char* const names[] = {"auto", "sockets", "grpc"};
    const Card& mine = cards[rank_];
    for (int peer = 0; peer < ranks_; ++peer) {
      const Card& card = cards[peer];
      if (card.magic != mine.magic || card.version != mine.version) {
        return Status(Code::kInvalidArgument,
                      Text(Who(peer), " has another version of tfscale (its sockets speak version ",
                           card.version, ", those of ", Who(rank_), " version ", mine.version,
                           "); install the same everywhere"));
      }
      if (card.choice != mine.choice) {
        return Status(
            Code::kInvalidArgument,
            Text(Who(peer), " was asked for transport '", names[card.choice % 3], "', ", Who(rank_),
                 " for '", names[mine.choice], "'; ask for the same transport on all ranks"));
      }
    }
    return Status();
  }

  Status Connect(const std::vector<Card>& cards, Clock::time_point until) {
    secret_.assign(cards[0].secret, kSecret);
    Neighbours::Get().Put(secret_, rank_, endpoint_);
    int callers = 0;
    size_t sharing = 1;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == rank_ || IsNeighbour(cards, peer)) continue;
      callers += peer > rank_;
      sharing += MayShare(cards, peer);
    }
    ring_bytes_ = settings_.ring_bytes;
    if (ring_bytes_ == 0) {
      ring_bytes_ = std::clamp(kSharedBytes / sharing, kLeastRing, kMostRing) / 4096 * 4096;
    }
    for (int peer = 0; peer < rank_; ++peer) {
      if (IsNeighbour(cards, peer)) continue;
      const Status status = Call(cards, peer, until);
      if (!status.ok()) return About(peer, status);
    }
    if (callers == 0) return Status();
    if (!listener_.open()) {
      return listening_.ok() ? Status(Code::kUnavailable, "no address to listen at is known")
                             : listening_;
    }
    Door door(std::move(listener_), secret_, rank_, ranks_);
    for (; callers > 0; --callers) {
      int from = -1;
      Socket socket;
      Status status = door.Answer(until, &from, &socket);
      if (!status.ok()) return Status(status.code(), status.message() + Absent(cards));
      if (missing_[from] > 0) {
        status = SendAll(socket.get(), std::string(1, 1), until);  // its caller waits for that
        if (!status.ok()) return About(from, status);
        AddStream(from, std::move(socket));
        continue;
      }
      if (IsNeighbour(cards, from) || ways_.count(from) > 0) {
        return Status(Code::kInvalidArgument, Who(from) + " called twice");
      }
      status = Welcome(cards, from, std::move(socket), until);
      if (!status.ok()) return About(from, status);
      callers += missing_[from];
    }
    return Status();
  }

  // Who calls now is sent away, and does not wait.
  void CloseDoor() { listener_ = Socket(); }

  // Once all have connected.
  std::shared_ptr<Endpoint> Begin(const std::vector<Card>& cards) {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == rank_) continue;
      if (IsNeighbour(cards, peer)) {
        endpoint_->Connect(peer, Neighbours::Get().Find(secret_, peer));
      } else {
        endpoint_->Connect(peer, ways_[peer]);
      }
    }
    for (auto& link : links_) Loop::Get().Add(link);
    return endpoint_;
  }

 private:
  std::string Who(int rank) const { return Text("rank ", rank, " (", peers_[rank], ")"); }
  Status About(int peer, const Status& status) const {
    return Status(status.code(), Who(peer) + ": " + status.message());
  }

  // Who should call and has not, for a message.
  std::string Absent(const std::vector<Card>& cards) const {
    std::string absent;
    for (int peer = rank_ + 1; peer < ranks_; ++peer) {
      const auto missing = missing_.find(peer);
      const bool whole = missing == missing_.end() || missing->second == 0;
      if (IsNeighbour(cards, peer) || (ways_.count(peer) > 0 && whole)) continue;
      absent += (absent.empty() ? "; not here yet: " : ", ") + Who(peer);
    }
    return absent;
  }

  bool IsNeighbour(const std::vector<Card>& cards, int peer) const {
    return settings_.pointers &&
           std::memcmp(cards[peer].process, cards[rank_].process, sizeof(Card::process)) == 0;
  }
  bool MayShare(const std::vector<Card>& cards, int peer) const {
    return settings_.shared_memory && Get(cards[peer].machine) == Get(cards[rank_].machine);
  }

  // Calls a rank below, and shares the memory that it offers if this side can open it.
  Status Call(const std::vector<Card>& cards, int peer, Clock::time_point until) {
    const Place place = {Get(cards[peer].host), cards[peer].port};
    if (place.port <= 0) return Status(Code::kUnavailable, "it does not listen");
    Socket socket;
    std::string bytes;
    Status status = CallAt(place, secret_, rank_, peer, sizeof(Offer), until, &socket, &bytes);
    if (!status.ok()) return Status(status.code(), place.Name() + ": " + status.message());
    Offer offer;
    std::memcpy(static_cast<void*>(&offer), bytes.data(), sizeof(offer));
    std::unique_ptr<Segment> segment;
    const bool sound = kLeastRing <= offer.ring_bytes && offer.ring_bytes <= kMostRing &&
                       offer.ring_bytes % 4096 == 0;
    if (offer.process > 0 && sound && MayShare(cards, peer)) {
      Status why;
      segment = Segment::Open(offer.process, offer.file, offer.ring_bytes,
                              std::string(offer.nonce, Segment::kNonce), &why);
    }
    status = SendAll(socket.get(), std::string(1, segment != nullptr ? 1 : 0), until);
    if (status.ok()) Link(cards, peer, std::move(socket), std::move(segment), 1);
    while (status.ok() && missing_[peer] > 0) {
      status = CallAt(place, secret_, rank_, peer, 1, until, &socket, &bytes);
      if (status.ok()) AddStream(peer, std::move(socket));
    }
    return status;
  }

  // Answers a rank above, and offers it memory if it may be on the same machine.
  Status Welcome(const std::vector<Card>& cards, int peer, Socket socket, Clock::time_point until) {
    Offer offer;
    std::unique_ptr<Segment> segment;
    if (MayShare(cards, peer)) {
      const std::string nonce = Random(Segment::kNonce);
      Status why;
      segment = Segment::Make(ring_bytes_, nonce, &why);
      if (segment != nullptr) {
        offer.process = getpid();
        offer.file = segment->file();
        offer.ring_bytes = ring_bytes_;
        std::memcpy(offer.nonce, nonce.data(), Segment::kNonce);
      }
    }
    std::string taken;
    Status status = SendAll(socket.get(), BytesOf(offer), until);
    if (status.ok()) status = ReceiveAll(socket.get(), 1, until, &taken);
    if (!status.ok()) return status;
    if (taken[0] != 1) segment = nullptr;
    Link(cards, peer, std::move(socket), std::move(segment), 0);
    return Status();
  }

  void Link(const std::vector<Card>& cards, int peer, Socket socket,
            std::unique_ptr<Segment> segment, int mine) {
    const std::string to = " to " + Place{Get(cards[peer].host), cards[peer].port}.Name();
    const int streams = std::min(cards[peer].streams, cards[rank_].streams);
    if (segment != nullptr) {
      segment->CloseFile();
      Take(peer,
           std::make_shared<SharedLink>(socket.Take(), std::move(segment), mine, peer, endpoint_));
    } else if (streams <= 1) {
      Take(peer, std::make_shared<TcpLink>(socket.Take(), peer, "TCP" + to, endpoint_));
    } else {
      bundles_[peer] =
          std::make_shared<Bundle>(peer, Text(streams, " TCP connections", to), endpoint_);
      ways_[peer] = bundles_[peer];
      missing_[peer] = streams;
      AddStream(peer, std::move(socket));
    }
  }

  void Take(int peer, const std::shared_ptr<sockets::Link>& link) {
    ways_[peer] = link;
    links_.push_back(link);
  }

  void AddStream(int peer, Socket socket) {
    links_.push_back(bundles_[peer]->Add(socket.Take()));
    --missing_[peer];
  }

  const int rank_, ranks_;
  const std::vector<std::string>& peers_;
  const Settings& settings_;
  const std::shared_ptr<Endpoint> endpoint_;
  Socket listener_;
  Status listening_;
  std::string secret_;
  size_t ring_bytes_ = 0;
  std::map<int, std::shared_ptr<Way>> ways_;
  std::map<int, std::shared_ptr<Bundle>> bundles_;
  std::map<int, int> missing_;  // connections of a bundle
  std::vector<std::shared_ptr<sockets::Link>> links_;
};

}  // namespace

// What an attempt has reached.
struct Attempt::Progress {
  Progress(int rank, const std::vector<std::string>& peers, const Settings& settings)
      : forming(rank, peers, settings) {}

  Forming forming;
  std::unique_ptr<Round<Card>> cards;
  std::unique_ptr<Round<Verdict>> verdicts;
};

Attempt::Attempt(int rank, const std::vector<std::string>& peers, const Settings& settings,
                 const std::shared_ptr<Channel>& other)
    : rank_(rank),
      peers_(peers),
      settings_(settings),
      other_(other),
      progress_(std::make_unique<Progress>(rank, peers_, settings_)) {}

Attempt::~Attempt() { other_->Cancel(); }

bool Attempt::open() const {
  return progress_->verdicts != nullptr ? progress_->verdicts->open() : progress_->cards->open();
}

Status Attempt::Form(Clock::time_point until, std::shared_ptr<Endpoint>* endpoint,
                     std::string* why) {
  Forming& forming = progress_->forming;
  auto& cards_round = progress_->cards;
  auto& verdicts_round = progress_->verdicts;
  if (cards_round == nullptr) {
    cards_round = std::make_unique<Round<Card>>(0, rank_, peers_, forming.MakeCard(), other_);
  }
  std::vector<Card> cards;
  Status status = cards_round->Wait(until, &cards);
  if (status.ok()) status = forming.Check(cards);
  if (!status.ok() || settings_.choice == Choice::kOther) return status;

  if (verdicts_round == nullptr) {
    status = forming.Connect(cards, std::min(until, Clock::now() + settings_.connecting));
    forming.CloseDoor();
    Verdict mine;
    mine.failed = !status.ok();
    Put(status.message(), mine.why);
    verdicts_round = std::make_unique<Round<Verdict>>(1, rank_, peers_, mine, other_);
  }
  std::vector<Verdict> verdicts;
  status = verdicts_round->Wait(until, &verdicts);
  if (!status.ok()) return status;
  for (size_t r = 0; r < verdicts.size(); ++r) {
    if (verdicts[r].failed == 0) continue;
    *why += Text(why->empty() ? "" : "; ", "rank ", r, " (", peers_[r],
                 ") could not connect: ", Get(verdicts[r].why));
  }
  if (why->empty()) *endpoint = forming.Begin(cards);
  if (!why->empty() && settings_.choice == Choice::kSockets) {
    return Status(Code::kUnavailable,
                  *why + ". With transport='auto' the ranks would go by TensorFlow's gRPC instead");
  }
  return Status();
}

}  // namespace sockets
}  // namespace tfscale
