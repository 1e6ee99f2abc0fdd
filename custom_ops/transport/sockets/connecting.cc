#include "custom_ops/transport/sockets/connecting.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "custom_ops/engine/text.h"
#include "custom_ops/transport/sockets/frame.h"
#include "custom_ops/transport/sockets/hmac.h"

namespace tfscale {
namespace sockets {
namespace {

constexpr size_t kNonce = 32;
constexpr size_t kMostVisitors = 64;
constexpr std::chrono::seconds kPatienceWithStrangers{2};

// What a caller says first.
struct Call {
  uint32_t magic = Frame::kMagic;
  uint32_t version = kVersion;
  int32_t from = 0, to = 0;
  uint8_t nonce[kNonce] = {};
};
static_assert(sizeof(Call) == 48, "calls of all builds are alike");

Status Failed(const std::string& what, int error) {
  return Status(Code::kUnavailable, what + ": " + std::strerror(error));
}

int Left(Clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

Status WaitFor(int socket, short events, Clock::time_point until) {
  pollfd one = {socket, events, 0};
  for (;;) {
    const int left = Left(until), found = poll(&one, 1, left);
    if (found > 0) return Status();
    if (found < 0 && errno != EINTR) return Failed("poll", errno);
    if (left == 0) return Status(Code::kDeadlineExceeded, "no answer in time");
  }
}

Status Prepare(int socket) {
  const int on = 1;
  if (fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK) != 0) {
    return Failed("fcntl", errno);
  }
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return Status();
}

Digest Proof(const std::string& secret, const char* who, const Call& call,
             const std::string& nonce) {
  return Hmac(secret,
              who + std::string(reinterpret_cast<const char*>(&call), sizeof(call)) + nonce);
}

std::string BytesOf(const Digest& digest) { return std::string(digest.begin(), digest.end()); }

bool Proves(const std::string& bytes, const Digest& expected) {
  Digest got;
  std::copy_n(bytes.begin(), got.size(), got.begin());
  return Same(got, expected);
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Status Resolve(const std::string& host, int port, Addresses* found) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* first = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &first);
  if (error != 0) return Status(Code::kUnavailable, host + ": " + gai_strerror(error));
  found->reset(first);
  return Status();
}

// The address of an interface of this name, or `name` itself.
std::string AddressOf(const std::string& name) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return name;
  std::string found = name;
  bool four = false;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || name != one->ifa_name) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && (family != AF_INET6 || four)) continue;
    char host[NI_MAXHOST];
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(one->ifa_addr, size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0) {
      continue;
    }
    four = family == AF_INET;
    found = host;
  }
  freeifaddrs(all);
  return found;
}

Status Bind(const addrinfo& address, int port, Socket* listener) {
  Socket made(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made.open()) return Failed("socket", errno);
  sockaddr_storage at = {};
  std::memcpy(&at, address.ai_addr, address.ai_addrlen);
  const uint16_t number = htons(static_cast<uint16_t>(port));
  if (address.ai_family == AF_INET) reinterpret_cast<sockaddr_in*>(&at)->sin_port = number;
  if (address.ai_family == AF_INET6) reinterpret_cast<sockaddr_in6*>(&at)->sin6_port = number;
  if (bind(made.get(), reinterpret_cast<sockaddr*>(&at), address.ai_addrlen) != 0 ||
      listen(made.get(), SOMAXCONN) != 0) {
    return Failed("cannot listen there", errno);
  }
  *listener = std::move(made);
  return Status();
}

Status PlaceOf(int socket, Place* place) {
  sockaddr_storage at = {};
  socklen_t size = sizeof(at);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&at), &size) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&at), size, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return Failed("getsockname", errno);
  }
  *place = {host, std::atoi(port)};
  return Status();
}

}  // namespace

Socket::~Socket() {
  if (descriptor_ >= 0) close(descriptor_);
}

std::string Place::Name() const {
  return host.find(':') == std::string::npos ? Text(host, ":", port) : Text("[", host, "]:", port);
}

std::string Random(size_t bytes) {
  std::string random(bytes, '\0');
  size_t got = 0;
  while (got < bytes) {
    const ssize_t n = getrandom(&random[got], bytes - got, 0);
    if (n > 0) got += static_cast<size_t>(n);
  }
  return random;
}

Status Listen(const std::string& host, int first_port, int last_port, Socket* listener,
              Place* place) {
  Addresses addresses(nullptr, freeaddrinfo);
  Status status = Resolve(AddressOf(host), 0, &addresses);
  if (!status.ok()) return status;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    for (int port = first_port; port <= last_port; ++port) {
      status = Bind(*one, port, listener);
      if (status.ok()) return PlaceOf(listener->get(), place);
    }
  }
  const std::string ports = last_port == 0 ? "" : Text(", ports ", first_port, " to ", last_port);
  return Status(status.code(), host + ports + ": " + status.message());
}

Status ConnectTo(const Place& place, Clock::time_point until, Socket* connected) {
  Addresses addresses(nullptr, freeaddrinfo);
  Status status = Resolve(place.host, place.port, &addresses);
  if (!status.ok()) return status;
  Socket made(socket(addresses->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!made.open()) return Failed(place.Name(), errno);
  status = Prepare(made.get());
  if (!status.ok()) return status;
  int error = 0;
  if (connect(made.get(), addresses->ai_addr, addresses->ai_addrlen) != 0) error = errno;
  if (error == EINPROGRESS) {
    status = WaitFor(made.get(), POLLOUT, until);
    if (!status.ok()) return Status(status.code(), place.Name() + ": " + status.message());
    socklen_t size = sizeof(error);
    getsockopt(made.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) return Failed(place.Name(), error);
  *connected = std::move(made);
  return Status();
}

Status SendAll(int socket, const std::string& bytes, Clock::time_point until) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = send(socket, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n >= 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      const Status status = WaitFor(socket, POLLOUT, until);
      if (!status.ok()) return status;
    } else if (errno != EINTR) {
      return Failed("send", errno);
    }
  }
  return Status();
}

Status ReceiveAll(int socket, size_t size, Clock::time_point until, std::string* bytes) {
  bytes->assign(size, '\0');
  size_t got = 0;
  while (got < size) {
    const ssize_t n = recv(socket, &(*bytes)[got], size - got, 0);
    if (n > 0) {
      got += static_cast<size_t>(n);
    } else if (n == 0) {
      return Status(Code::kUnavailable, "it closed the connection");
    } else if (errno == EAGAIN) {
      const Status status = WaitFor(socket, POLLIN, until);
      if (!status.ok()) return status;
    } else if (errno != EINTR) {
      return Failed("receive", errno);
    }
  }
  return Status();
}

Status ProveAsCaller(int socket, const std::string& secret, int from, int to,
                     Clock::time_point until) {
  Call call;
  call.from = from;
  call.to = to;
  const std::string nonce = Random(kNonce);
  std::copy(nonce.begin(), nonce.end(), call.nonce);
  Status status =
      SendAll(socket, std::string(reinterpret_cast<const char*>(&call), sizeof(call)), until);
  std::string theirs, proof;
  if (status.ok()) status = ReceiveAll(socket, kNonce, until, &theirs);
  if (status.ok()) status = ReceiveAll(socket, sizeof(Digest), until, &proof);
  if (!status.ok()) return status;
  if (!Proves(proof, Proof(secret, "door", call, theirs))) {
    return Status(Code::kInvalidArgument, "who answers there does not know the group's secret");
  }
  return SendAll(socket, BytesOf(Proof(secret, "caller", call, theirs)), until);
}

Status Door::Prove(int socket, Clock::time_point until, int* from) {
  std::string bytes, proof;
  Status status = ReceiveAll(socket, sizeof(Call), until, &bytes);
  if (!status.ok()) return status;
  Call call;
  std::memcpy(&call, bytes.data(), sizeof(call));
  const bool sound = call.magic == Frame::kMagic && call.version == kVersion && call.to == rank_ &&
                     0 <= call.from && call.from < ranks_ && call.from != rank_;
  if (!sound) return Status(Code::kInvalidArgument, "a stranger called");
  const std::string nonce = Random(kNonce);
  status = SendAll(socket, nonce + BytesOf(Proof(secret_, "door", call, nonce)), until);
  if (status.ok()) status = ReceiveAll(socket, sizeof(Digest), until, &proof);
  if (!status.ok()) return status;
  if (!Proves(proof, Proof(secret_, "caller", call, nonce))) {
    return Status(Code::kInvalidArgument, "a caller does not know the group's secret");
  }
  *from = call.from;
  return Status();
}

// Those that say nothing hold up nobody.
Status Door::Answer(Clock::time_point until, int* from, Socket* socket) {
  for (;;) {
    std::vector<pollfd> all = {{listener_.get(), POLLIN, 0}};
    for (const Visitor& one : visitors_) all.push_back({one.socket.get(), POLLIN, 0});
    const int left = Left(until), found = poll(all.data(), all.size(), std::min(left, 200));
    if (found <= 0 && left == 0) return Status(Code::kDeadlineExceeded, "nobody called in time");
    const Clock::time_point now = Clock::now();
    for (size_t i = visitors_.size(); i-- > 0;) {
      const bool spoke = found > 0 && all[i + 1].revents != 0;
      if (!spoke && now < visitors_[i].since + kPatienceWithStrangers) continue;
      Socket visitor = std::move(visitors_[i].socket);
      visitors_.erase(visitors_.begin() + i);
      if (!spoke ||
          !Prove(visitor.get(), std::min(until, now + kPatienceWithStrangers), from).ok()) {
        continue;
      }
      *socket = std::move(visitor);
      return Status();
    }
    if (found <= 0 || all[0].revents == 0) continue;
    Socket visitor(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!visitor.open()) {
      if (errno == EMFILE || errno == ENFILE) return Failed("accept", errno);
      continue;
    }
    if (Prepare(visitor.get()).ok() && visitors_.size() < kMostVisitors) {
      visitors_.push_back({std::move(visitor), now});
    }
  }
}

}  // namespace sockets
}  // namespace tfscale
