// How two processes connect and prove to each other that they belong to the same group.
//
// Both know the group's secret, which came by another way. Each shows, by an HMAC over both sides'
// nonces, that it knows it; nothing that the other sends is believed before.
#ifndef TFSCALE_TRANSPORT_SOCKETS_CONNECTING_H_
#define TFSCALE_TRANSPORT_SOCKETS_CONNECTING_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/engine/status.h"
#include "custom_ops/engine/watchdog.h"
#include "custom_ops/transport/sockets/hmac.h"

namespace tfscale {
namespace sockets {

// A descriptor that is closed unless somebody takes it.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(other.Take()) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket();

  bool open() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }
  int Take() {
    const int taken = descriptor_;
    descriptor_ = -1;
    return taken;
  }

 private:
  int descriptor_ = -1;
};

// Where a rank listens: "10.0.0.3" and a port.
struct Place {
  std::string host;
  int port = 0;

  std::string Name() const;
};

// So many bytes that nobody can guess.
std::string Random(size_t bytes);

// Listens on one address of this machine: that of `host`, a name or a number, or that of the
// network interface of this name. Ports: any if both are 0.
Status Listen(const std::string& host, int first_port, int last_port, Socket* listener,
              Place* place);

// `place` has an address, not a name: no name server is asked on behalf of a peer.
Status ConnectTo(const Place& place, Clock::time_point until, Socket* socket);

// All or nothing, in time.
Status SendAll(int socket, const std::string& bytes, Clock::time_point until);
Status ReceiveAll(int socket, size_t size, Clock::time_point until, std::string* bytes);

// The side that has connected proves that it is rank `from`.
Status ProveAsCaller(int socket, const std::string& secret, int from, int to,
                     Clock::time_point until);

// Connects to rank `to`, proves to be rank `from`, and reads the answer, of so many bytes. A door
// before which too many strangers stand may send a rank away before it has heard it: that calls
// again. Where nobody listens any more, that rank has given up.
Status CallAt(const Place& place, const std::string& secret, int from, int to, size_t answer_bytes,
              Clock::time_point until, Socket* socket, std::string* answer);

// Waits at a listener for ranks that call. It waits for no single one of them: strangers who say
// nothing, or a part of what they should, delay nobody. If there are too many, those who came
// first are sent away.
class Door {
 public:
  Door(Socket listener, const std::string& secret, int rank, int ranks)
      : listener_(std::move(listener)), secret_(secret), rank_(rank), ranks_(ranks) {}

  // The next rank that calls and proves who it is. Who cannot is sent away.
  Status Answer(Clock::time_point until, int* from, Socket* socket);

 private:
  // Somebody who has connected and proven nothing yet.
  struct Stranger {
    Socket socket;
    std::string said = "";  // the beginning of its call, or of its proof
    bool called = false;
    int from = -1;      // the rank that it says it is
    Digest proof = {};  // what it must say next if that is true
  };
  enum class Verdict { kStranger, kProven, kRefused };

  Verdict Hear(Stranger* stranger) const;
  bool AnswerCall(Stranger* stranger) const;
  Status LetIn();
  void SendOneAway();

  const Socket listener_;
  const std::string secret_;
  const int rank_, ranks_;
  std::vector<Stranger> strangers_;  // in the order in which they came
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_CONNECTING_H_
