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
#include <thread>

#include "custom_ops/engine/text.h"
#include "custom_ops/transport/sockets/frame.h"
#include "custom_ops/transport/sockets/hmac.h"

namespace tfscale {
namespace sockets {
namespace {

constexpr size_t kNonce = 32;
constexpr size_t kMostStrangers = 256;  // descriptors that they may hold
constexpr size_t kAtOnce = 16;
constexpr std::chrono::milliseconds kFirstPause{10}, kLongestPause{200};  // before calling again

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

// Whether a call may begin like this.
bool MayBeCall(const std::string& bytes) {
  return std::memcmp(bytes.data(), &Frame::kMagic, std::min(bytes.size(), sizeof(uint32_t))) == 0;
}

bool Proves(const std::string& bytes, const Digest& expected) {
  Digest got;
  std::copy_n(bytes.begin(), got.size(), got.begin());
  return Same(got, expected);
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Status Resolve(const std::string& host, int port, int flags, Addresses* found) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
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
  Status status = Resolve(AddressOf(host), 0, 0, &addresses);
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
  Status status = Resolve(place.host, place.port, AI_NUMERICHOST, &addresses);
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

Status CallAt(const Place& place, const std::string& secret, int from, int to, size_t answer_bytes,
              Clock::time_point until, Socket* socket, std::string* answer) {
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    Status status = ConnectTo(place, until, socket);
    if (!status.ok()) return status;
    status = ProveAsCaller(socket->get(), secret, from, to, until);
    if (status.ok()) status = ReceiveAll(socket->get(), answer_bytes, until, answer);
    const bool sent_away = status.code() == Code::kUnavailable;
    if (!sent_away || Clock::now() + pause >= until) return status;
    std::this_thread::sleep_for(pause);
  }
}

// Reads what has come, and answers it, without waiting for more.
Door::Verdict Door::Hear(Stranger* stranger) const {
  for (;;) {
    const size_t expected = stranger->called ? sizeof(Digest) : sizeof(Call);
    char bytes[sizeof(Call)];
    const ssize_t n =
        recv(stranger->socket.get(), bytes, expected - stranger->said.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return Verdict::kStranger;
    if (n <= 0) return Verdict::kRefused;
    stranger->said.append(bytes, static_cast<size_t>(n));
    if (!stranger->called && !MayBeCall(stranger->said)) return Verdict::kRefused;
    if (stranger->said.size() < expected) continue;
    if (stranger->called) {
      return Proves(stranger->said, stranger->proof) ? Verdict::kProven : Verdict::kRefused;
    }
    if (!AnswerCall(stranger)) return Verdict::kRefused;
  }
}

// What is sent fits into the buffer of a connection over which nothing was sent before.
bool Door::AnswerCall(Stranger* stranger) const {
  Call call;
  std::memcpy(&call, stranger->said.data(), sizeof(call));
  const bool sound = call.magic == Frame::kMagic && call.version == kVersion && call.to == rank_ &&
                     0 <= call.from && call.from < ranks_ && call.from != rank_;
  if (!sound) return false;
  const std::string nonce = Random(kNonce);
  stranger->called = true;
  stranger->from = call.from;
  stranger->proof = Proof(secret_, "caller", call, nonce);
  stranger->said.clear();
  const std::string answer = nonce + BytesOf(Proof(secret_, "door", call, nonce));
  return SendAll(stranger->socket.get(), answer, Clock::now()).ok();
}

Status Door::Answer(Clock::time_point until, int* from, Socket* socket) {
  for (;;) {
    std::vector<pollfd> all = {{listener_.get(), POLLIN, 0}};
    for (const Stranger& one : strangers_) all.push_back({one.socket.get(), POLLIN, 0});
    const int left = Left(until), found = poll(all.data(), all.size(), left);
    if (found < 0 && errno != EINTR) return Failed("poll", errno);
    for (size_t i = strangers_.size(); found > 0 && i-- > 0;) {
      if (all[i + 1].revents == 0) continue;
      const Verdict verdict = Hear(&strangers_[i]);
      if (verdict == Verdict::kStranger) continue;
      Stranger heard = std::move(strangers_[i]);
      strangers_.erase(strangers_.begin() + i);
      if (verdict == Verdict::kRefused) continue;
      *from = heard.from;
      *socket = std::move(heard.socket);
      return Status();
    }
    if (found > 0 && all[0].revents != 0) {
      const Status status = LetIn();
      if (!status.ok()) return status;
    }
    if (left == 0) return Status(Code::kDeadlineExceeded, "nobody called in time");
  }
}

// A few at a time, so that those who speak are heard in between.
Status Door::LetIn() {
  for (size_t i = 0; i < kAtOnce; ++i) {
    Socket come(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const int error = come.open() ? 0 : errno;
    if (error == EAGAIN) return Status();
    const bool no_descriptor = error == EMFILE || error == ENFILE;
    if (no_descriptor && strangers_.empty()) return Failed("accept", error);
    if (no_descriptor || strangers_.size() == kMostStrangers) SendOneAway();
    if (error == 0 && Prepare(come.get()).ok()) strangers_.push_back({std::move(come)});
  }
  return Status();
}

// The first that came, of those that have called if they are the most, else of those that have not:
// a rank is among the fewer, unless strangers do both. If it is sent away, it calls again.
void Door::SendOneAway() {
  const auto called = [](const Stranger& one) { return one.called; };
  const size_t callers = std::count_if(strangers_.begin(), strangers_.end(), called);
  const bool most = 2 * callers > strangers_.size();
  strangers_.erase(std::find_if(strangers_.begin(), strangers_.end(),
                                [&](const Stranger& one) { return called(one) == most; }));
}

}  // namespace sockets
}  // namespace tfscale
