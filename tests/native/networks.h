// The networks that the engine's tests run over. The variable NETWORK names one: memory (the
// default), pointers, shared (memory), tcp or streams (several TCP connections for each pair).
#ifndef TFSCALE_TESTS_NATIVE_NETWORKS_H_
#define TFSCALE_TESTS_NATIVE_NETWORKS_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "custom_ops/transport/memory.h"
#include "custom_ops/transport/sockets/forming.h"

namespace tfscale {

class Network {
 public:
  virtual ~Network() = default;
  virtual std::shared_ptr<Channel> Open(int rank) = 0;

  // From now on messages from and to this rank fail, as if its process had ended.
  virtual void Kill(int rank) = 0;
};

class InMemory : public Network {
 public:
  InMemory(int threads, uint64_t seed) : network_(threads, seed) {}
  std::shared_ptr<Channel> Open(int rank) override { return network_.Open(rank); }
  void Kill(int rank) override { network_.Kill(rank); }

 private:
  MemoryNetwork network_;
};

// All ranks join, each in a thread of its own; `settings` by rank.
struct Joined {
  std::vector<std::shared_ptr<sockets::Endpoint>> endpoints;
  std::vector<Status> statuses;
  std::vector<std::string> why;
};

inline Joined JoinAll(const std::vector<sockets::Settings>& settings,
                      std::chrono::seconds patience = std::chrono::seconds(60)) {
  const size_t ranks = settings.size();
  MemoryNetwork control;
  Joined joined = {std::vector<std::shared_ptr<sockets::Endpoint>>(ranks),
                   std::vector<Status>(ranks), std::vector<std::string>(ranks)};
  std::vector<std::string> peers;
  for (size_t r = 0; r < ranks; ++r) peers.push_back("worker " + std::to_string(r));
  std::vector<std::unique_ptr<sockets::Attempt>> attempts;
  for (size_t r = 0; r < ranks; ++r) {
    const int rank = static_cast<int>(r);
    attempts.push_back(
        std::make_unique<sockets::Attempt>(rank, peers, settings[r], control.Open(rank)));
  }
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      joined.statuses[r] = attempts[r]->Form(std::chrono::steady_clock::now() + patience,
                                             &joined.endpoints[r], &joined.why[r]);
    });
  }
  for (auto& thread : threads) thread.join();
  return joined;
}

class OverSockets : public Network {
 public:
  OverSockets(int ranks, const sockets::Settings& settings) {
    const Joined joined = JoinAll(std::vector<sockets::Settings>(ranks, settings));
    for (const Status& status : joined.statuses) EXPECT_TRUE(status.ok()) << status.message();
    for (const std::string& why : joined.why) EXPECT_EQ(why, "");
    endpoints_ = joined.endpoints;
  }
  std::shared_ptr<Channel> Open(int rank) override { return endpoints_[rank]->Open(); }
  void Kill(int rank) override { endpoints_[rank]->Leave(); }

 private:
  std::vector<std::shared_ptr<sockets::Endpoint>> endpoints_;
};

inline sockets::Settings SettingsOf(const std::string& network) {
  sockets::Settings settings;
  settings.choice = sockets::Choice::kSockets;
  settings.host = "127.0.0.1";
  settings.pointers = network == "pointers";
  settings.shared_memory = network == "shared";
  settings.streams = network == "streams" ? 3 : 1;
  settings.ring_bytes = size_t{256} << 10;  // small enough to be full at times
  return settings;
}

inline std::string ChosenNetwork() {
  const char* chosen = std::getenv("NETWORK");
  return chosen == nullptr ? "memory" : chosen;
}

// `threads` and `seed` are of memory alone.
inline std::shared_ptr<Network> MakeNetwork(int ranks, int threads, uint64_t seed) {
  const std::string network = ChosenNetwork();
  if (network == "memory") return std::make_shared<InMemory>(threads, seed);
  return std::make_shared<OverSockets>(ranks, SettingsOf(network));
}

}  // namespace tfscale

#endif  // TFSCALE_TESTS_NATIVE_NETWORKS_H_
