// Fuzzes what a peer may send over a connection, or write into shared memory: whatever it is, the
// link ends it or goes on, and touches no memory that is not the message's own.
//
// The first byte picks: bytes as they are, frames whose header is sound but for what the input
// says, records in a ring, or a caller at the door.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/transport/sockets/connecting.h"
#include "custom_ops/transport/sockets/endpoint.h"
#include "custom_ops/transport/sockets/frame.h"
#include "custom_ops/transport/sockets/segment.h"
#include "custom_ops/transport/sockets/shared_link.h"
#include "custom_ops/transport/sockets/tcp_link.h"

namespace {

using namespace tfscale;           // NOLINT
using namespace tfscale::sockets;  // NOLINT

constexpr size_t kRing = size_t{64} << 10;
constexpr size_t kSizes[] = {8, 100, 40000, 100000};  // of what is waited for

void Require(bool condition) {
  if (!condition) std::abort();
}

// A rank that waits for some messages of its only peer, and offers some.
class Rank {
 public:
  Rank() : endpoint_(std::make_shared<Endpoint>(0, 2)) {}

  void Begin(std::shared_ptr<Link> link) {
    endpoint_->Connect(1, link);
    channel_ = endpoint_->Open();
    for (uint64_t i = 0; i < 4; ++i) {
      View into = i % 2 == 0 ? BufferPool::OfProcess().Get(kSizes[i]) : View();
      into.size = kSizes[i];
      channel_->Receive(1, KeyOf(i), into, [i](Status status, View bytes) {
        Require(!status.ok() || bytes.size == kSizes[i]);
        volatile uint8_t last = status.ok() ? bytes.data[bytes.size - 1] : 0;
        (void)last;
      });
      channel_->Post(1, KeyOf(10 + i), BufferPool::OfProcess().Get(kSizes[i]), [](Status) {});
    }
  }

  ~Rank() {
    channel_->Cancel();
    endpoint_->Leave();
  }

  static Key KeyOf(uint64_t number) { return {number, 0, 0, 0, 0, 0, 1}; }
  const std::shared_ptr<Endpoint>& endpoint() const { return endpoint_; }

 private:
  const std::shared_ptr<Endpoint> endpoint_;
  std::shared_ptr<Channel> channel_;
};

// A header that is nearly right: a few bytes of the input choose what it says.
Frame FrameOf(const uint8_t* data) {
  Frame frame;
  frame.kind = data[0] % 9;
  frame.size = data[1] < 128 ? kSizes[data[1] % 4] : uint64_t{1} << (data[1] % 64);
  frame.number = data[2];
  frame.here = data[3] < 128 ? frame.size : data[3];
  frame.key = Rank::KeyOf(data[4] % 16);
  if (data[5] == 7) frame.magic = 7;
  return frame;
}

std::string Frames(const uint8_t* data, size_t size) {
  std::string bytes;
  for (size_t i = 0; i + 6 <= size; i += 6) {
    const Frame frame = FrameOf(data + i);
    bytes.append(reinterpret_cast<const char*>(&frame), sizeof(frame));
    bytes.append(std::min<uint64_t>(frame.size, 100000) * (data[i + 5] % 3) / 2, 'x');
  }
  return bytes;
}

void Drain(int socket) {
  char bytes[4096];
  while (recv(socket, bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
  }
}

void TryTcp(const std::string& bytes) {
  int ends[2];
  Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  {
    Rank rank;
    auto link = std::make_shared<TcpLink>(ends[0], 1, "", rank.endpoint());
    rank.Begin(link);
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t n =
          send(ends[1], bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) sent += static_cast<size_t>(n);
      link->Ready(true, true);
      Drain(ends[1]);
      if (n <= 0 && errno != EAGAIN) break;
    }
    shutdown(ends[1], SHUT_WR);
    link->Ready(true, true);
  }
  close(ends[1]);
}

void TryShared(const uint8_t* data, size_t size) {
  int ends[2];
  Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  const std::string nonce(Segment::kNonce, 'n');
  Status status;
  auto segment = Segment::Make(kRing, nonce, &status);
  auto theirs = Segment::Open(getpid(), segment->file(), kRing, nonce, &status);
  Require(segment != nullptr && theirs != nullptr);
  {
    Rank rank;
    auto link = std::make_shared<SharedLink>(ends[0], std::move(segment), 0, 1, rank.endpoint());
    rank.Begin(link);
    uint64_t written = 0;
    for (size_t i = 0; i + 7 <= size; i += 7) {
      Frame frame = FrameOf(data + i);
      const uint64_t at = written % kRing;
      std::memcpy(theirs->ring(1) + std::min<uint64_t>(at, kRing - sizeof(frame)), &frame,
                  sizeof(frame));
      const uint64_t body = (std::min<uint64_t>(frame.here, kRing) + 63) / 64 * 64;
      written += data[i + 6] < 200 ? sizeof(frame) + body : uint64_t{data[i + 6]} << 9;
      theirs->head(1)->written = written;
      theirs->head(0)->freed = data[i + 5] < 200 ? theirs->head(0)->written.load() : data[i + 5];
      link->Poll();
      Drain(ends[1]);
    }
    shutdown(ends[1], SHUT_WR);
    link->Ready(true, false);
  }
  close(ends[1]);
}

void TryDoor(const std::string& bytes) {
  Socket listener, caller, visitor;
  Place place;
  Require(Listen("127.0.0.1", 0, 0, &listener, &place).ok());
  Door door(std::move(listener), std::string(32, 's'), 0, 4);
  const auto until = Clock::now() + std::chrono::milliseconds(20);
  Require(ConnectTo(place, until + std::chrono::seconds(5), &caller).ok());
  (void)SendAll(caller.get(), bytes, until);
  shutdown(caller.get(), SHUT_WR);
  int from = -1;
  Require(!door.Answer(until, &from, &visitor).ok() && from == -1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const int which = data[0] % 16;
  if (which == 0) {
    TryDoor(rest);
  } else if (which < 4) {
    TryTcp(rest);
  } else if (which < 10) {
    TryTcp(Frames(data + 1, size - 1));
  } else {
    TryShared(data + 1, size - 1);
  }
  return 0;
}
