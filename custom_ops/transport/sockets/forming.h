// How ranks become a group over sockets. Addresses and a fresh secret travel over another
// transport that is there already; then all connect, and all agree whether that went well.
#ifndef TFSCALE_TRANSPORT_SOCKETS_FORMING_H_
#define TFSCALE_TRANSPORT_SOCKETS_FORMING_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "custom_ops/engine/transport.h"
#include "custom_ops/transport/sockets/endpoint.h"

namespace tfscale {
namespace sockets {

// What was asked for; all ranks must ask for the same.
enum class Choice : uint32_t { kAuto = 0, kSockets = 1, kOther = 2 };

struct Settings {
  Choice choice = Choice::kAuto;
  std::string host;                     // where to listen, for ranks of other processes
  int first_port = 0, last_port = 0;    // 0: any
  bool pointers = true;                 // between ranks of one process
  bool shared_memory = true;            // between processes of one host
  std::chrono::seconds connecting{10};  // the longest that it may take; only firewalls take longer
  int streams = 1;                      // TCP connections of each pair
  size_t ring_bytes = 0;                // of shared memory, in each direction; 0: by their number
};

// One rank's way into the group. A wait that ends in vain does not end the attempt: what this rank
// has said stays, late ranks hear it, and Form() can be called again, to wait for the rest.
class Attempt {
 public:
  // peers: who each rank is, for messages. other: what words travel over until sockets connect.
  Attempt(int rank, const std::vector<std::string>& peers, const Settings& settings,
          const std::shared_ptr<Channel>& other);
  ~Attempt();  // ends what is still under way

  // Blocks until all ranks have agreed, at the latest `until`. Without an endpoint and without an
  // error, the ranks go on over the other transport; `why` says why, unless all asked for that.
  Status Form(std::chrono::steady_clock::time_point until, std::shared_ptr<Endpoint>* endpoint,
              std::string* why);

  // After Form(): whether it waits for other ranks still. If not, only another attempt can help.
  bool open() const;

 private:
  struct Progress;

  const int rank_;
  const std::vector<std::string> peers_;
  const Settings settings_;
  const std::shared_ptr<Channel> other_;
  const std::unique_ptr<Progress> progress_;
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_FORMING_H_
