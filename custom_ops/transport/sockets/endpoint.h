// One rank's end of all its connections: brings messages that are posted and receives that wait
// for them together.
#ifndef TFSCALE_TRANSPORT_SOCKETS_ENDPOINT_H_
#define TFSCALE_TRANSPORT_SOCKETS_ENDPOINT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "custom_ops/engine/transport.h"
#include "custom_ops/transport/sockets/link.h"

namespace tfscale {
namespace sockets {

// A message, seen from one rank: who the other is, and the message's key.
struct Address {
  int peer;
  Key key;

  bool operator==(const Address& other) const;
};

struct AddressHash {
  size_t operator()(const Address& address) const;
};

class Endpoint : public Receiver, public std::enable_shared_from_this<Endpoint> {
 public:
  // How much a peer may make this rank keep; collectives make it keep far less. Messages that
  // nobody waits for yet, in bytes, of which each counts kEarlyCost more than it has: the least
  // that a buffer takes, and what is remembered of it. And questions for messages that are not
  // posted yet.
  static constexpr size_t kMostEarly = size_t{256} << 20;
  static constexpr size_t kEarlyCost = 1536;
  static constexpr size_t kMostWanted = size_t{1} << 20;

  Endpoint(int rank, int ranks)
      : rank_(rank), ways_(ranks), neighbours_(ranks), lost_(ranks), kept_(ranks) {}
  ~Endpoint() override;

  // Before the first message. A neighbour is a rank of the same process.
  void Connect(int peer, std::shared_ptr<sockets::Way> way) { ways_[peer] = std::move(way); }
  void Connect(int peer, std::weak_ptr<Endpoint> neighbour) { neighbours_[peer] = neighbour; }

  std::shared_ptr<Channel> Open();

  // From now on nothing comes and goes.
  void Leave();

  // How it reaches a peer: "shared memory".
  std::string Way(int peer) const;

  bool Told(int from, const Frame& frame) override;
  std::shared_ptr<Arrival> Begins(int from, const Frame& frame) override;
  void Ends(int from, const std::shared_ptr<Arrival>& arrival, View bytes) override;
  void Lost(int peer, const std::string& why) override;

 private:
  class SocketChannel;

  struct Posted {
    View bytes;
    Done done;
    const Channel* channel;
  };
  struct Small : Posted {
    Address address;
  };
  struct Awaited {
    View into;
    Taken done;
    const Channel* channel;
  };
  // A small message that nobody waits for yet.
  struct Early {
    View bytes;
    uint64_t number = 0;
  };
  struct Message : Arrival {
    Address address;
    uint64_t number = 0;  // of a small one
    bool small = false, early = false;
    Taken done;
    const Channel* channel = nullptr;
  };
  // What is kept because of one peer.
  struct Kept {
    size_t early = 0;   // bytes, as they count
    size_t wanted = 0;  // questions
  };
  template <typename What>
  using ByAddress = std::unordered_map<Address, What, AddressHash>;

  void Post(int to, const Key& key, Posted message);
  void Receive(int from, const Key& key, Awaited awaited);
  void Cancel(const Channel* channel);

  void Offer(int from, const Key& key, Posted message);
  void CancelOffers(const Channel* channel);
  static void HandOver(Posted from, Awaited to);
  bool Wanted(const Address& address);
  void ForgetWanted(const Address& address);
  Early TakeEarly(ByAddress<Early>::iterator early);
  void Expel(int peer, const std::string& why);
  bool TakenBy(int peer, uint64_t number);
  void Tell(int peer, uint32_t kind, const Key& key, size_t size, uint64_t number);
  void SendLarge(const Address& address, Posted message);

  const int rank_;
  std::vector<std::shared_ptr<sockets::Way>> ways_;  // by rank
  std::vector<std::weak_ptr<Endpoint>> neighbours_;  // likewise

  std::mutex mutex_;               // of what follows
  std::vector<std::string> lost_;  // by rank: why, or empty
  bool left_ = false;
  uint64_t next_number_ = 1;
  std::unordered_map<uint64_t, Small> small_;        // sent and not yet taken
  ByAddress<Posted> large_;                          // not yet wanted
  std::unordered_set<Address, AddressHash> wanted_;  // and not yet posted
  ByAddress<Awaited> awaited_;
  ByAddress<Early> early_;
  std::vector<Kept> kept_;                        // by rank
  ByAddress<Posted> offers_;                      // of neighbours
  ByAddress<std::shared_ptr<Message>> arriving_;  // some of their bytes are here
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_ENDPOINT_H_
