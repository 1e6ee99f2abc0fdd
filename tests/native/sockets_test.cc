// What sockets do beyond what the engine's tests ask of every network: who is let in, what
// happens to messages that nobody wants any more, and how ranks agree to go another way.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <future>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "custom_ops/transport/sockets/connecting.h"
#include "custom_ops/transport/sockets/frame.h"
#include "custom_ops/transport/sockets/hmac.h"
#include "custom_ops/transport/sockets/segment.h"
#include "custom_ops/transport/sockets/shared_link.h"
#include "custom_ops/transport/sockets/tcp_link.h"
#include "tests/native/networks.h"

namespace tfscale {
namespace sockets {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Clock::time_point Soon() { return Clock::now() + seconds(20); }

std::string Hex(const Digest& digest) {
  std::string text;
  char two[3];
  for (uint8_t byte : digest) {
    std::snprintf(two, sizeof(two), "%02x", byte);
    text += two;
  }
  return text;
}

bool Says(const std::string& message, const std::string& text) {
  return message.find(text) != std::string::npos;
}

// ---------------------------------------------------------------------------
// Proofs

TEST(Sha256, IsAsPublished) {  // FIPS 180-4
  EXPECT_EQ(Hex(Sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Hex(Sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Hex(Sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Hex(Sha256(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Hmac, IsAsPublished) {  // RFC 4231
  EXPECT_EQ(Hex(Hmac(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(Hex(Hmac("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(
      Hex(Hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

// ---------------------------------------------------------------------------
// The door

class AtTheDoor : public testing::Test {
 protected:
  void SetUp() override {
    Socket listener;
    ASSERT_TRUE(Listen("127.0.0.1", 0, 0, &listener, &place_).ok());
    door_ = std::make_unique<Door>(std::move(listener), secret_, 0, 3);
  }

  Socket Connected() {
    Socket socket;
    EXPECT_TRUE(ConnectTo(place_, Soon(), &socket).ok());
    return socket;
  }

  // A rank that knows the secret, in a thread of its own.
  std::future<Status> Caller(int rank) {
    return std::async(std::launch::async, [this, rank] {
      friend_ = Connected();
      return ProveAsCaller(friend_.get(), secret_, rank, 0, Soon());
    });
  }

  void ExpectThatRankOneComesIn() {
    auto caller = Caller(1);
    int from = -1;
    Socket socket;
    const Status status = door_->Answer(Soon(), &from, &socket);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(from, 1);
    EXPECT_TRUE(caller.get().ok());
  }

  // What strangers say: nothing, a part of a call, something else, or a call without a proof.
  std::vector<std::string> Sayings() {
    struct {
      uint32_t magic = Frame::kMagic, version = kVersion;
      int32_t from = 2, to = 0;
      uint8_t nonce[32] = {};
    } call;
    const std::string whole(reinterpret_cast<const char*>(&call), sizeof(call));
    return {"",     whole.substr(0, 1), whole.substr(0, 40), whole, whole + whole, Random(1000),
            "GET /"};
  }

  const std::string secret_ = Random(32);
  Place place_;
  std::unique_ptr<Door> door_;
  Socket friend_;
};

TEST_F(AtTheDoor, WhoKnowsTheSecretComesIn) { ExpectThatRankOneComesIn(); }

TEST_F(AtTheDoor, StrangersHoldUpNobody) {
  std::vector<Socket> silent;
  for (int i = 0; i < 10; ++i) silent.push_back(Connected());
  Socket garbage = Connected(), half = Connected(), web = Connected();
  EXPECT_TRUE(SendAll(garbage.get(), Random(1000), Soon()).ok());
  EXPECT_TRUE(SendAll(half.get(), "\xe5\xa1", Soon()).ok());
  EXPECT_TRUE(
      SendAll(web.get(), "GET / HTTP/1.1\r\nHost: tfscale\r\n\r\n" + std::string(99, ' '), Soon())
          .ok());
  { const Socket gone = Connected(); }
  ExpectThatRankOneComesIn();
}

TEST_F(AtTheDoor, HundredsOfStrangersHoldUpNobody) {
  for (const std::string& saying : Sayings()) {
    SCOPED_TRACE(saying.size());
    std::vector<Socket> strangers;
    for (int i = 0; i < 300; ++i) {
      strangers.push_back(Connected());
      (void)SendAll(strangers.back().get(), saying, Soon());
    }
    ExpectThatRankOneComesIn();
  }
}

TEST_F(AtTheDoor, ARankWhoseWordIsOnItsWayIsWaitedForWhileStrangersCome) {
  for (const std::string& saying : Sayings()) {
    SCOPED_TRACE(saying.size());
    Socket slow = Connected();
    std::vector<Socket> strangers;
    auto caller = std::async(std::launch::async, [&] {
      EXPECT_TRUE(SendAll(slow.get(), "", Soon()).ok());
      for (int i = 0; i < 100; ++i) {
        strangers.push_back(Connected());
        (void)SendAll(strangers.back().get(), saying, Soon());
      }
      return ProveAsCaller(slow.get(), secret_, 1, 0, Soon());
    });
    int from = -1;
    Socket socket;
    EXPECT_TRUE(door_->Answer(Soon(), &from, &socket).ok());
    EXPECT_EQ(from, 1);
    EXPECT_TRUE(caller.get().ok());
  }
}

TEST_F(AtTheDoor, WhileStrangersComeTheWaitHasAnEnd) {
  std::atomic<bool> over{false};
  std::thread flood([&] {
    while (!over) Connected();
  });
  int from = -1;
  Socket socket;
  const Status status = door_->Answer(Clock::now() + milliseconds(200), &from, &socket);
  over = true;
  flood.join();
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.message();
}

TEST_F(AtTheDoor, WhoDoesNotKnowTheSecretStaysOut) {
  auto guess = std::async(std::launch::async, [&] {
    Socket socket = Connected();
    return ProveAsCaller(socket.get(), Random(32), 2, 0, Soon());
  });
  int from = -1;
  Socket socket;
  EXPECT_FALSE(door_->Answer(Clock::now() + seconds(1), &from, &socket).ok());
  EXPECT_EQ(from, -1);
  const Status told = guess.get();
  EXPECT_TRUE(Says(told.message(), "does not know the group's secret")) << told.message();
}

TEST_F(AtTheDoor, ACallerLearnsThatTheWrongProgramListens) {
  Socket listener;
  Place place;
  ASSERT_TRUE(Listen("127.0.0.1", 0, 0, &listener, &place).ok());
  Socket caller;
  ASSERT_TRUE(ConnectTo(place, Soon(), &caller).ok());
  const int server = accept(listener.get(), nullptr, nullptr);
  EXPECT_TRUE(SendAll(server, Random(64), Soon()).ok());
  const Status status = ProveAsCaller(caller.get(), secret_, 1, 0, Soon());
  EXPECT_TRUE(Says(status.message(), "does not know the group's secret")) << status.message();
  close(server);
}

TEST(Calling, WhoIsSentAwayCallsAgain) {
  const std::string secret = Random(32);
  Socket listener;
  Place place;
  ASSERT_TRUE(Listen("127.0.0.1", 0, 0, &listener, &place).ok());
  auto caller = std::async(std::launch::async, [&] {
    Socket socket;
    std::string answer;
    const Status status = CallAt(place, secret, 1, 0, 4, Soon(), &socket, &answer);
    return status.ok() ? answer : status.message();
  });
  for (int times = 0; times < 5; ++times) {
    pollfd ready = {listener.get(), POLLIN, 0};
    ASSERT_EQ(poll(&ready, 1, 20000), 1);
    const Socket away(accept(listener.get(), nullptr, nullptr));
  }
  Door door(std::move(listener), secret, 0, 2);
  int from = -1;
  Socket socket;
  ASSERT_TRUE(door.Answer(Soon(), &from, &socket).ok());
  EXPECT_TRUE(SendAll(socket.get(), "here", Soon()).ok());
  EXPECT_EQ(caller.get(), "here");
}

TEST(Calling, WhereNobodyListensAnyMoreTheCallEnds) {
  Place place;
  {
    Socket listener;
    ASSERT_TRUE(Listen("127.0.0.1", 0, 0, &listener, &place).ok());
  }
  Socket socket;
  std::string answer;
  const Status status = CallAt(place, Random(32), 1, 0, 4, Soon(), &socket, &answer);
  EXPECT_TRUE(Says(status.message(), "refused")) << status.message();
}

TEST(Calling, NoNameServerIsAskedForAPeer) {
  Socket socket;
  const Status status = ConnectTo({"localhost", 1}, Soon(), &socket);
  EXPECT_FALSE(status.ok() || Says(status.message(), "refused")) << status.message();
}

TEST(Listening, IsOnTheAddressAndPortsThatWereAskedFor) {
  Socket one, two, three;
  Place place, other;
  ASSERT_TRUE(Listen("localhost", 0, 0, &one, &place).ok());
  EXPECT_TRUE(place.host == "127.0.0.1" || place.host == "::1") << place.host;
  ASSERT_TRUE(Listen("lo", place.port + 1, place.port + 20, &two, &other).ok());
  EXPECT_EQ(other.host, "127.0.0.1");
  EXPECT_GT(other.port, place.port);
  const Status full = Listen("127.0.0.1", other.port, other.port, &three, &place);
  EXPECT_TRUE(Says(full.message(), "in use")) << full.message();
  const Status foreign = Listen("192.0.2.1", 0, 0, &three, &place);
  EXPECT_TRUE(Says(foreign.message(), "192.0.2.1")) << foreign.message();
  EXPECT_FALSE(Listen("no such host", 0, 0, &three, &place).ok());
}

TEST(Segment, IsOpenedByWhoKnowsItsNonce) {
  const std::string nonce = Random(Segment::kNonce);
  Status status;
  auto made = Segment::Make(size_t{1} << 16, nonce, &status);
  ASSERT_NE(made, nullptr) << status.message();
  auto opened = Segment::Open(getpid(), made->file(), size_t{1} << 16, nonce, &status);
  ASSERT_NE(opened, nullptr) << status.message();
  made->ring(1)[5] = 77;
  EXPECT_EQ(opened->ring(1)[5], 77);
  EXPECT_EQ(Segment::Open(getpid(), made->file(), size_t{1} << 16, Random(32), &status), nullptr);
  EXPECT_EQ(Segment::Open(getpid(), made->file(), size_t{1} << 17, nonce, &status), nullptr);
  EXPECT_EQ(Segment::Open(getpid(), 0, size_t{1} << 16, nonce, &status), nullptr);
}

TEST(Segment, NobodyMakesItShorter) {
  const std::string nonce = Random(Segment::kNonce);
  Status status;
  auto made = Segment::Make(size_t{1} << 16, nonce, &status);
  ASSERT_NE(made, nullptr) << status.message();
  EXPECT_NE(ftruncate(made->file(), 0), 0);
  auto opened = Segment::Open(getpid(), made->file(), size_t{1} << 16, nonce, &status);
  ASSERT_NE(opened, nullptr) << status.message();
  EXPECT_NE(ftruncate(opened->file(), 4096), 0);
  EXPECT_NE(ftruncate(opened->file(), 1 << 20), 0);
  made->ring(1)[(1 << 16) - 1] = 77;
  EXPECT_EQ(opened->ring(1)[(1 << 16) - 1], 77);
}

TEST(Segment, OneThatCouldBecomeShorterIsNotMapped) {
  const std::string nonce = Random(Segment::kNonce);
  const Socket file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(file.get(), 4096 + 2 * (1 << 16)), 0);
  ASSERT_EQ(pwrite(file.get(), nonce.data(), nonce.size(), 0), static_cast<ssize_t>(nonce.size()));
  Status status;
  EXPECT_EQ(Segment::Open(getpid(), file.get(), size_t{1} << 16, nonce, &status), nullptr);
  EXPECT_TRUE(Says(status.message(), "is no memory whose size is sealed")) << status.message();
}

// ---------------------------------------------------------------------------
// Joining

TEST(Joining, RanksThatAskForDifferentTransportsAreTold) {
  std::vector<Settings> settings(3, SettingsOf("tcp"));
  settings[1].choice = Choice::kOther;
  const Joined joined = JoinAll(settings);
  for (const Status& status : joined.statuses) {
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(Says(status.message(), "'grpc'") && Says(status.message(), "'sockets'"))
        << status.message();
  }
}

TEST(Joining, WhereOneCannotConnectAllGoTheOtherWay) {
  for (Choice choice : {Choice::kAuto, Choice::kSockets}) {
    std::vector<Settings> settings(3, SettingsOf("tcp"));
    for (Settings& one : settings) one.choice = choice;
    settings[1].host = "192.0.2.1";  // not of this machine
    const Joined joined = JoinAll(settings);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(joined.endpoints[r], nullptr);
      EXPECT_EQ(joined.statuses[r].ok(), choice == Choice::kAuto);
      EXPECT_TRUE(Says(joined.why[r], "rank 1 (worker 1) could not connect: 192.0.2.1"))
          << joined.why[r];
      EXPECT_TRUE(Says(joined.why[r], "rank 2 (worker 2) could not connect: rank 1 (worker 1)"))
          << joined.why[r];
    }
  }
}

TEST(Joining, TooFewDescriptorsAreSaid) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "UndefinedBehaviorSanitizer looks at memory by a pipe of its own";
#endif
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  std::vector<Socket> all;
  rlimit few = before;
  few.rlim_cur = 64;
  setrlimit(RLIMIT_NOFILE, &few);
  for (int taken = dup(1); taken >= 0; taken = dup(1)) all.push_back(Socket(taken));
  for (int left = 0; left < 4; ++left) {  // at whatever point they run out
    const Joined joined = JoinAll(std::vector<Settings>(2, [] {
      Settings settings = SettingsOf("shared");
      settings.choice = Choice::kAuto;
      settings.connecting = seconds(1);  // one may wait for another that cannot call
      return settings;
    }()));
    for (int r = 0; r < 2; ++r) {
      EXPECT_TRUE(joined.statuses[r].ok()) << joined.statuses[r].message();
      EXPECT_EQ(joined.endpoints[r], nullptr);
      EXPECT_TRUE(Says(joined.why[r], "Too many open files")) << joined.why[r];
    }
    if (!all.empty()) all.pop_back();
  }
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST(Joining, NobodyConnectsWhenAllAskForTheOther) {
  std::vector<Settings> settings(2, SettingsOf("tcp"));
  for (Settings& one : settings) one.choice = Choice::kOther;
  const Joined joined = JoinAll(settings);
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(joined.statuses[r].ok());
    EXPECT_EQ(joined.endpoints[r], nullptr);
    EXPECT_EQ(joined.why[r], "");
  }
}

TEST(Joining, WaysAreNamed) {
  const auto way = [](const std::string& network) {
    return JoinAll(std::vector<Settings>(2, SettingsOf(network))).endpoints[0]->Way(1);
  };
  EXPECT_EQ(way("pointers"), "the same process");
  EXPECT_EQ(way("shared"), "shared memory");
  EXPECT_TRUE(Says(way("tcp"), "TCP to 127.0.0.1:"));
  EXPECT_TRUE(Says(way("streams"), "3 TCP connections to 127.0.0.1:"));
}

TEST(Joining, RanksThatAskForMoreConnectionsThanOthersGetAsManyAsThese) {
  std::vector<Settings> settings(3, SettingsOf("streams"));
  settings[1].streams = 2;
  settings[2].streams = 1;
  const Joined joined = JoinAll(settings);
  for (int way : {0, 1}) {
    EXPECT_TRUE(Says(joined.endpoints[way]->Way(1 - way), "2 TCP connections to"));
    EXPECT_TRUE(Says(joined.endpoints[way]->Way(2), "TCP to")) << joined.endpoints[way]->Way(2);
  }
}

TEST(Joining, WhereOneRankSharesNoMemoryItsPairsGoByTcp) {
  std::vector<Settings> settings(3, SettingsOf("shared"));
  settings[1].shared_memory = false;
  const Joined joined = JoinAll(settings);
  EXPECT_TRUE(Says(joined.endpoints[0]->Way(1), "TCP"));
  EXPECT_TRUE(Says(joined.endpoints[1]->Way(2), "TCP"));
  EXPECT_EQ(joined.endpoints[0]->Way(2), "shared memory");
}

// Connects to a place again and again, and holds some of the connections.
class Flood {
 public:
  Flood(const Place& place, std::string saying)
      : thread_([this, place, saying] {
          for (size_t i = 0; !over_; ++i) {
            Socket& one = held_[i % held_.size()];
            one = Socket();
            const Status status = ConnectTo(place, Soon(), &one);
            if (status.ok()) (void)SendAll(one.get(), saying, Soon());
          }
        }) {}
  ~Flood() {
    over_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::array<Socket, 300> held_;
  std::thread thread_;
};

TEST(Joining, StrangersDelayNobody) {
  for (const char* network : {"tcp", "streams"}) {
    std::vector<Settings> settings(3, SettingsOf(network));
    std::vector<Place> places(2);
    {
      // Below the ports that systems give to those who call: else one could call itself.
      const int first = 12000 + getpid() * 101 % 10000;  // far from a twin's
      Socket free[2];
      for (int r : {0, 1}) {
        ASSERT_TRUE(Listen("127.0.0.1", first, first + 10000, &free[r], &places[r]).ok());
        settings[r].first_port = settings[r].last_port = places[r].port;
      }
    }
    for (Settings& one : settings) one.connecting = seconds(60);
    const Flood silent(places[0], ""), brief(places[0], "\xe5"), garbage(places[1], Random(99));
    const Joined joined = JoinAll(settings);
    for (int r = 0; r < 3; ++r) {
      EXPECT_TRUE(joined.statuses[r].ok()) << joined.statuses[r].message();
      EXPECT_NE(joined.endpoints[r], nullptr) << joined.why[r];
    }
  }
}

TEST(Joining, WhoDoesNotCallIsNamed) {
  std::vector<Settings> settings(3, SettingsOf("tcp"));
  for (Settings& one : settings) one.choice = Choice::kAuto;
  settings[0].connecting = seconds(1);
  settings[1].connecting = seconds(0);
  const Joined joined = JoinAll(settings);
  // Rank 1 gives up at once: before it calls, before it is welcomed, or after it; then rank 2 has
  // not called it.
  const bool named =
      Says(joined.why[0], "nobody called in time; not here yet: rank 1 (worker 1)") ||
      Says(joined.why[0], "rank 0 (worker 0) could not connect: rank 1 (worker 1): ") ||
      Says(joined.why[0], "nobody called in time; not here yet: rank 2 (worker 2)");
  EXPECT_TRUE(named) << joined.why[0];
}

TEST(Joining, RanksThatWaitedOneAfterTheOtherComeTogetherLater) {
  const std::vector<std::string> peers = {"worker 0", "worker 1", "worker 2"};
  MemoryNetwork control;
  std::vector<std::unique_ptr<Attempt>> attempts;
  std::shared_ptr<Endpoint> none;
  std::string why;
  Settings settings;
  settings.choice = Choice::kOther;
  const auto form = [&](int rank, milliseconds patience) {
    return attempts[rank]->Form(std::chrono::steady_clock::now() + patience, &none, &why);
  };
  for (int rank = 0; rank < 3; ++rank) {
    attempts.push_back(std::make_unique<Attempt>(rank, peers, settings, control.Open(rank)));
  }
  for (int rank = 0; rank < 2; ++rank) {
    const Status status = form(rank, milliseconds(20));
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.message();
    EXPECT_TRUE(Says(status.message(), "rank 2 (worker 2)")) << status.message();
    EXPECT_EQ(Says(status.message(), "rank 1 (worker 1)"), rank == 0) << status.message();
    EXPECT_TRUE(attempts[rank]->open());
  }
  for (int rank = 2; rank >= 0; --rank) {
    const Status status = form(rank, seconds(60));
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_FALSE(attempts[rank]->open());
  }
}

// ---------------------------------------------------------------------------
// Peers that break the protocol

// A rank whose only peer is this test.
class BadPeer : public testing::Test {
 protected:
  BadPeer() {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends_), 0);
  }
  ~BadPeer() override {
    endpoint_->Leave();
    close(ends_[1]);
  }

  void OverTcp() {
    tcp_ = std::make_shared<TcpLink>(ends_[0], 1, "TCP", endpoint_);
    endpoint_->Connect(1, tcp_);
  }

  // Sends frames of the kind, each with another key, and has them read.
  void Send(uint32_t kind, size_t count, uint64_t first_key = 1) {
    std::vector<Frame> frames(256);
    for (size_t sent = 0; sent < count;) {
      const size_t now = std::min(frames.size(), count - sent);
      for (size_t i = 0; i < now; ++i) {
        frames[i].kind = kind;
        frames[i].key.collective = first_key + sent + i;
      }
      const ssize_t size = static_cast<ssize_t>(now * sizeof(Frame));
      if (send(ends_[1], frames.data(), size, MSG_NOSIGNAL) != size) return;  // it has hung up
      tcp_->Ready(true, false);
      sent += now;
    }
  }

  // Why nothing can come from the peer; empty if something can.
  std::string Gone() {
    std::string why;
    const auto channel = endpoint_->Open();
    channel->Receive(1, {uint64_t{1} << 60, 0, 0, 0, 0, 0, 1}, {nullptr, 8, nullptr},
                     [&why](const Status& status, const View&) {
                       if (status.code() == Code::kUnavailable) why = status.message();
                     });
    channel->Cancel();
    return why;
  }

  const std::shared_ptr<Endpoint> endpoint_ = std::make_shared<Endpoint>(0, 2);
  std::shared_ptr<TcpLink> tcp_;
  int ends_[2];
};

TEST_F(BadPeer, ThatSendsMessagesThatNobodyWaitsFor) {
  OverTcp();
  const size_t most = Endpoint::kMostEarly / Endpoint::kEarlyCost;
  Send(Frame::kData, most);
  EXPECT_EQ(Gone(), "");
  Send(Frame::kWithdraw, most);
  Send(Frame::kData, most);
  EXPECT_EQ(Gone(), "") << "what was withdrawn counts no more";
  Send(Frame::kData, 1, most + 1);
  EXPECT_TRUE(Says(Gone(), "more messages that nobody waits for than fit into 256 MiB")) << Gone();
}

TEST_F(BadPeer, ThatAsksForMessagesThatNobodySends) {
  OverTcp();
  Send(Frame::kWant, Endpoint::kMostWanted);
  EXPECT_EQ(Gone(), "");
  Send(Frame::kUnwant, 1);
  Send(Frame::kWant, 1);
  EXPECT_EQ(Gone(), "") << "what is not wanted any more counts no more";
  Send(Frame::kWant, 1, Endpoint::kMostWanted + 1);
  EXPECT_TRUE(Says(Gone(), "asked for more than 1048576 messages")) << Gone();
}

TEST_F(BadPeer, WhoSendsAMessageTwiceHasSentTheFirst) {
  OverTcp();
  const size_t most = Endpoint::kMostEarly / Endpoint::kEarlyCost;
  for (int times = 0; times < 3; ++times) Send(Frame::kData, most - 1);
  EXPECT_EQ(Gone(), "") << "what counts once";
}

TEST_F(BadPeer, ThatWritesWhereThisRankStillReads) {
  constexpr size_t kRing = size_t{64} << 10, kSize = 8192;
  const std::string nonce = Random(Segment::kNonce);
  Status status;
  auto segment = Segment::Make(kRing, nonce, &status);
  const auto theirs = Segment::Open(getpid(), segment->file(), kRing, nonce, &status);
  ASSERT_NE(theirs, nullptr) << status.message();
  auto link = std::make_shared<SharedLink>(ends_[0], std::move(segment), 0, 1, endpoint_);
  endpoint_->Connect(1, link);
  const auto channel = endpoint_->Open();
  View held;
  channel->Receive(1, {1, 0, 0, 0, 0, 0, 1}, {nullptr, kSize, nullptr},
                   [&held](const Status&, View bytes) { held = std::move(bytes); });
  Frame frame;
  frame.key = {1, 0, 0, 0, 0, 0, 1};
  frame.size = frame.here = kSize;
  uint64_t written = 0;
  const auto write = [&](size_t bytes) {
    std::memcpy(theirs->ring(1) + written % kRing, &frame, sizeof(frame));
    theirs->head(1)->written = written += bytes;
    link->Poll();
  };
  write(sizeof(frame) + kSize);
  ASSERT_NE(held.data, nullptr);
  frame.size = frame.here = 0;
  while (written < kRing) {
    ++frame.key.collective;
    write(sizeof(frame));
  }
  EXPECT_EQ(Gone(), "");
  ++frame.key.collective;
  write(sizeof(frame));
  EXPECT_TRUE(Says(Gone(), "where there was no room")) << Gone();
  held = View();
}

// ---------------------------------------------------------------------------
// Messages

class Pair : public testing::TestWithParam<std::string> {
 protected:
  // Statuses as they come.
  class Told {
   public:
    Done Posted() {
      return [state = state_](Status status) { state->Add(status, ""); };
    }
    Taken Received() {
      return [state = state_](Status status, View bytes) {
        state->Add(status, std::string(bytes.data, bytes.data + bytes.size));
      };
    }
    Status Wait() {
      std::unique_lock<std::mutex> lock(state_->mutex);
      if (!state_->some.wait_for(lock, seconds(20), [&] { return state_->count > 0; })) {
        return Status(Code::kDeadlineExceeded, "nothing came");
      }
      return state_->status;
    }
    std::string bytes() const { return state_->bytes; }
    int count() const {
      std::lock_guard<std::mutex> lock(state_->mutex);
      return state_->count;
    }

   private:
    struct State {
      void Add(const Status& told, std::string got) {
        std::lock_guard<std::mutex> lock(mutex);
        status = told;
        bytes = std::move(got);
        ++count;
        some.notify_all();
      }
      std::mutex mutex;
      std::condition_variable some;
      Status status;
      std::string bytes;
      int count = 0;
    };
    const std::shared_ptr<State> state_ = std::make_shared<State>();
  };

  void SetUp() override {
    const Joined joined = JoinAll(std::vector<Settings>(2, SettingsOf(GetParam())));
    for (const Status& status : joined.statuses) ASSERT_TRUE(status.ok()) << status.message();
    ends_ = joined.endpoints;
    a_ = ends_[0]->Open();
    b_ = ends_[1]->Open();
  }

  static Key KeyOf(uint64_t number) { return {number, 0, 0, 0, 0, 0, 1}; }
  static View Bytes(const std::string& text) {
    auto owned = std::make_shared<std::string>(text);
    return {reinterpret_cast<uint8_t*>(&(*owned)[0]), owned->size(), owned};
  }
  static View Anywhere(size_t size) {
    View view;
    view.size = size;
    return view;
  }
  // Far larger than a ring.
  static std::string Large(char c = 'x') { return std::string(size_t{3} << 20, c); }

  std::vector<std::shared_ptr<Endpoint>> ends_;
  std::shared_ptr<Channel> a_, b_;
};

TEST_P(Pair, BringsMessagesWhicheverSideIsFirst) {
  for (const std::string& text : {std::string("hello"), Large()}) {
    for (bool in_place : {false, true}) {
      for (bool post_first : {false, true}) {
        static uint64_t number = 100;
        const Key key = KeyOf(++number);
        Told posted, received;
        const auto post = [&] { a_->Post(1, key, Bytes(text), posted.Posted()); };
        if (post_first) post();
        if (post_first) std::this_thread::sleep_for(milliseconds(20));
        b_->Receive(0, key, in_place ? Bytes(std::string(text.size(), '?')) : Anywhere(text.size()),
                    received.Received());
        if (!post_first) std::this_thread::sleep_for(milliseconds(20));
        if (!post_first) post();
        EXPECT_TRUE(received.Wait().ok());
        EXPECT_TRUE(received.bytes() == text);
        EXPECT_TRUE(posted.Wait().ok());
      }
    }
  }
}

TEST_P(Pair, AMessageIsNotTakenBeforeSomebodyWaitsForIt) {
  for (const std::string& text : {std::string("hello"), Large()}) {
    Told posted;
    a_->Post(1, KeyOf(text.size()), Bytes(text), posted.Posted());
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_EQ(posted.count(), 0);
    a_->Cancel();
    EXPECT_EQ(posted.Wait().code(), Code::kCancelled);
    a_ = ends_[0]->Open();
  }
}

TEST_P(Pair, WhatWasCancelledIsGone) {
  for (const std::string& text : {std::string("hello"), Large()}) {
    const Key key = KeyOf(text.size());
    Told withdrawn, received, posted;
    a_->Post(1, key, Bytes(text), withdrawn.Posted());
    std::this_thread::sleep_for(milliseconds(50));
    a_->Cancel();
    EXPECT_EQ(withdrawn.Wait().code(), Code::kCancelled);
    a_ = ends_[0]->Open();
    std::this_thread::sleep_for(milliseconds(50));
    b_->Receive(0, key, Anywhere(text.size()), received.Received());
    std::this_thread::sleep_for(milliseconds(50));
    EXPECT_EQ(received.count(), 0) << "of a message that was withdrawn";
    b_->Cancel();
    EXPECT_EQ(received.Wait().code(), Code::kCancelled);
    b_ = ends_[1]->Open();
    std::this_thread::sleep_for(milliseconds(50));
    a_->Post(1, key, Bytes(text), posted.Posted());
    std::this_thread::sleep_for(milliseconds(50));
    EXPECT_EQ(posted.count(), 0) << "though nobody waits any more";
    a_->Cancel();
    a_ = ends_[0]->Open();
  }
}

TEST_P(Pair, OneChannelsEndIsNotAnothers) {
  auto other = ends_[1]->Open();
  Told mine, theirs;
  other->Receive(0, KeyOf(1), Anywhere(5), theirs.Received());
  b_->Receive(0, KeyOf(2), Anywhere(5), mine.Received());
  other->Cancel();
  EXPECT_EQ(theirs.Wait().code(), Code::kCancelled);
  Told posted;
  a_->Post(1, KeyOf(2), Bytes("hello"), posted.Posted());
  EXPECT_TRUE(mine.Wait().ok());
  EXPECT_TRUE(posted.Wait().ok());
  Told late;
  other->Receive(0, KeyOf(3), Anywhere(5), late.Received());
  EXPECT_EQ(late.Wait().code(), Code::kCancelled);
}

TEST_P(Pair, SizesMustAgree) {
  const std::pair<size_t, size_t> sizes[] = {{5, 6}, {6, 5}, {size_t{1} << 20, size_t{1} << 21}};
  uint64_t number = 10;
  for (const auto& [sent, expected] : sizes) {
    Told posted, received;
    const Key key = KeyOf(++number);
    b_->Receive(0, key, Anywhere(expected), received.Received());
    a_->Post(1, key, Bytes(std::string(sent, 'x')), posted.Posted());
    const Status status = received.Wait();
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_TRUE(Says(status.message(), "sizes differ")) << status.message();
  }
  a_->Cancel();
}

TEST_P(Pair, AKeyIsUsedOnce) {
  Told one, two;
  b_->Receive(0, KeyOf(1), Anywhere(5), one.Received());
  b_->Receive(0, KeyOf(1), Anywhere(5), two.Received());
  EXPECT_TRUE(Says(two.Wait().message(), "used twice"));
  b_->Cancel();
}

TEST_P(Pair, WhoLeavesIsMissedAtOnce) {
  Told small, large, received, later, posted_later;
  a_->Post(1, KeyOf(1), Bytes("hello"), small.Posted());
  a_->Post(1, KeyOf(2), Bytes(Large()), large.Posted());
  a_->Receive(1, KeyOf(3), Anywhere(5), received.Received());
  ends_[1]->Leave();
  EXPECT_EQ(received.Wait().code(), Code::kUnavailable);
  a_->Receive(1, KeyOf(4), Anywhere(5), later.Received());
  EXPECT_EQ(later.Wait().code(), Code::kUnavailable);
  a_->Post(1, KeyOf(5), Bytes("hello"), posted_later.Posted());
  EXPECT_EQ(posted_later.Wait().code(), Code::kUnavailable);
  if (GetParam() == "pointers") return;  // there it is the receiver who keeps an offer
  EXPECT_EQ(small.Wait().code(), Code::kUnavailable);
  EXPECT_EQ(large.Wait().code(), Code::kUnavailable);
}

TEST_P(Pair, WhatWasSentBeforeLeavingArrives) {
  Told received, posted;
  b_->Receive(0, KeyOf(1), Anywhere(5), received.Received());
  a_->Post(1, KeyOf(1), Bytes("hello"), posted.Posted());
  EXPECT_TRUE(posted.Wait().ok());
  ends_[0]->Leave();
  EXPECT_TRUE(received.Wait().ok());
}

// What holds the bytes of a cancelled message is let go of once, and not before the network is
// done with them; the sanitizers see to that.
TEST_P(Pair, ManyMessagesArriveWhole) {
  std::mt19937 random(7);
  constexpr int kMessages = 2000;
  struct Expected {
    Told posted, received;
    std::string text;
    bool cancelled = false;
  };
  std::vector<Expected> all(kMessages);
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<Channel>> channels;
  std::mutex mutex;
  for (int i = 0; i < kMessages; ++i) {
    const bool big = random() % 20 == 0;
    const size_t size = 1 + random() % (big ? 700000 : 3000);
    all[i].text = std::string(size, static_cast<char>('a' + random() % 26));
    all[i].cancelled = random() % 10 == 0;
  }
  for (int side = 0; side < 2; ++side) {
    threads.emplace_back([&, side] {
      std::mt19937 own(side);
      for (int i = 0; i < kMessages; ++i) {
        const bool sends = (i % 2 == 0) == (side == 0);
        auto channel = ends_[side]->Open();
        if (sends) {
          channel->Post(1 - side, KeyOf(1000 + i), Bytes(all[i].text), all[i].posted.Posted());
        } else {
          channel->Receive(1 - side, KeyOf(1000 + i), Anywhere(all[i].text.size()),
                           all[i].received.Received());
        }
        if (all[i].cancelled && own() % 2 == 0) channel->Cancel();
        std::lock_guard<std::mutex> lock(mutex);
        channels.push_back(channel);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (Expected& one : all) {
    if (one.cancelled) continue;
    ASSERT_TRUE(one.received.Wait().ok());
    ASSERT_TRUE(one.received.bytes() == one.text);
    ASSERT_TRUE(one.posted.Wait().ok());
  }
  for (auto& channel : channels) channel->Cancel();
  for (Expected& one : all) {
    EXPECT_LE(one.posted.count(), 1);
    EXPECT_LE(one.received.count(), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Over, Pair, testing::Values("pointers", "shared", "tcp", "streams"),
                         [](const auto& info) { return info.param; });

// ---------------------------------------------------------------------------
// Ends

// The progress thread lets go of what has ended a little later.
int DescriptorsOnceSettled() {
  int last = -1, same = 0;
  while (same < 10) {
    int count = 0;
    for (int i = 0; i < 1024; ++i) count += fcntl(i, F_GETFD) >= 0;
    same = count == last ? same + 1 : 0;
    last = count;
    std::this_thread::sleep_for(milliseconds(20));
  }
  return last;
}

TEST(Ends, NothingIsLeftOpen) {
  JoinAll(std::vector<Settings>(3, SettingsOf("shared")));  // starts what stays for good
  const int before = DescriptorsOnceSettled();
  for (int i = 0; i < 5; ++i) {
    for (const char* network : {"shared", "tcp", "pointers"}) {
      JoinAll(std::vector<Settings>(3, SettingsOf(network)));
    }
  }
  EXPECT_EQ(DescriptorsOnceSettled(), before);
}

}  // namespace
}  // namespace sockets
}  // namespace tfscale
