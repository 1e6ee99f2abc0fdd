// Ranks in one process, for tests: each with a communicator of its own, all on
// one network.
#ifndef TFSCALE_TESTS_NATIVE_WORLD_H_
#define TFSCALE_TESTS_NATIVE_WORLD_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/engine/communicator.h"
#include "custom_ops/wire/codec.h"
#include "tests/native/networks.h"
#include "tests/native/programs.h"

namespace tfscale {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Long enough for any machine; no test waits for it.
constexpr milliseconds kPatience{60000};

template <typename T>
Bytes BytesOf(const std::vector<T>& numbers) {
  Bytes bytes(numbers.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

template <typename T>
std::vector<T> As(const Bytes& bytes) {
  std::vector<T> numbers(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(T));
  return numbers;
}

// What all ranks run together.
struct Task {
  const Plan* plan = nullptr;
  Layout layout = Layout::Joined(0, 1, 1, 1);
  wire::Format format = wire::Format::kFp32;
  wire::Element element = wire::Element::kFloat32;
  wire::Rounding rounding;
  bool mean = false;
  bool in_place = false;
  std::string name = "bucket";
  std::string signature = "the same";
  int64_t step = 0;

  Task() = default;
  // `size`: of the whole buffer; rounded up to whole shards where there are shards.
  Task(const Plan& plan, int64_t size, int64_t piece, wire::Format format = wire::Format::kFp32)
      : plan(&plan), layout(Cut(plan, size, piece, format)), format(format) {}

  const wire::Codec& codec() const { return *wire::Find(format, element); }
  int ranks() const { return plan->ranks; }
  int64_t count() const { return layout.count(); }

 private:
  // As custom_ops/kernels does it.
  static Layout Cut(const Plan& plan, int64_t size, int64_t piece, wire::Format format) {
    const int64_t unit = format == wire::Format::kFp32 ? 16 : wire::kBlock;
    const bool sharded = plan.goal == Goal::kReduceScatter || plan.goal == Goal::kAllGather;
    if (!sharded) {
      return Layout::Joined(size, plan.chunks, piece, unit);
    }
    return Layout::Sharded((size + plan.ranks - 1) / plan.ranks, plan.chunks, piece, unit);
  }
};

// One rank's memory. After a failure nobody may look at it: some thread may
// still write.
struct Buffers {
  Bytes x, y;
  Floats residual, new_residual;

  const uint8_t* Result() const { return y.empty() ? x.data() : y.data(); }
};

// One status for each of n collectives.
class Outcomes {
 public:
  explicit Outcomes(int n) : state_(std::make_shared<State>(n)) {}

  Done For(int i) {
    return [state = state_, i](Status status) {
      std::lock_guard<std::mutex> lock(state->mutex);
      if (state->done[i]++ > 0) ADD_FAILURE() << "done was called twice";
      state->statuses[i] = std::move(status);
      --state->left;
      state->all.notify_all();
    };
  }

  std::vector<Status> Wait() {
    std::unique_lock<std::mutex> lock(state_->mutex);
    const bool in_time = state_->all.wait_for(lock, kPatience, [&] { return state_->left == 0; });
    EXPECT_TRUE(in_time) << state_->left << " collectives never end";
    return state_->statuses;
  }

  int left() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->left;
  }

 private:
  struct State {
    explicit State(int n)
        : left(n), done(n), statuses(n, Status(Code::kInternal, "still running")) {}
    std::mutex mutex;
    std::condition_variable all;
    int left;
    std::vector<int> done;
    std::vector<Status> statuses;
  };
  std::shared_ptr<State> state_;
};

// How much data was sent; hellos and farewells, which a slow machine may add,
// are left out.
struct Traffic {
  std::atomic<int64_t> messages{0}, bytes{0};
};

class CountingChannel : public Channel {
 public:
  CountingChannel(std::shared_ptr<Channel> channel, std::shared_ptr<Traffic> traffic)
      : channel_(std::move(channel)), traffic_(std::move(traffic)) {}

  void Post(int to, const Key& key, View bytes, Done done) override {
    if (key.kind == kPartialMessage || key.kind == kFinalMessage) {
      ++traffic_->messages;
      traffic_->bytes += static_cast<int64_t>(bytes.size);
    }
    channel_->Post(to, key, std::move(bytes), std::move(done));
  }
  void Receive(int from, const Key& key, View into, Taken done) override {
    channel_->Receive(from, key, std::move(into), std::move(done));
  }
  void Cancel() override { channel_->Cancel(); }
  bool awaits_for_free() const override { return channel_->awaits_for_free(); }

 private:
  const std::shared_ptr<Channel> channel_;
  const std::shared_ptr<Traffic> traffic_;
};

class World {
 public:
  explicit World(int ranks, int threads = 0, uint64_t seed = 1, Patience patience = {kPatience})
      : network_(MakeNetwork(ranks, threads, seed)) {
    std::vector<std::string> peers;
    for (int r = 0; r < ranks; ++r) peers.push_back("worker " + std::to_string(r));
    for (int r = 0; r < ranks; ++r) ranks_.push_back(Communicator::Make(r, peers, patience));
  }

  Network& network() { return *network_; }
  Traffic& traffic() { return *traffic_; }
  Communicator& rank(int r) { return *ranks_[r]; }
  int ranks() const { return static_cast<int>(ranks_.size()); }

  std::shared_ptr<Collective> Start(const Task& task, int rank,
                                    const std::shared_ptr<Buffers>& buffers, Done done) {
    if (!task.in_place) buffers->y.assign(buffers->x.size(), 0xcd);
    return ranks_[rank]->Start(MakeRequest(task, rank, buffers), std::move(done));
  }

  Request MakeRequest(const Task& task, int rank, const std::shared_ptr<Buffers>& buffers) {
    Request request;
    request.bucket = {task.name};
    request.name = task.name;
    request.signature = task.signature;
    request.step = task.step;
    request.program = task.plan->programs[rank];
    request.layout = task.layout;
    request.codec = &task.codec();
    request.element = task.element;
    request.rounding = task.rounding;
    request.mean = task.mean;
    request.x = buffers->x.data();
    request.y = task.in_place ? buffers->x.data() : buffers->y.data();
    if (!buffers->residual.empty()) {
      buffers->new_residual.assign(buffers->residual.size(), -77.0f);
      request.residual = buffers->residual.data();
      request.new_residual = buffers->new_residual.data();
    }
    request.owner = buffers;
    request.open = OpenFor(rank);
    return request;
  }

  // With zeros for data, when only the outcome matters.
  std::shared_ptr<Collective> Start(const Task& task, int rank, Done done) {
    auto buffers = std::make_shared<Buffers>();
    buffers->x.resize(task.count() * task.codec().element_bytes());
    return Start(task, rank, buffers, std::move(done));
  }

  // Runs it on all ranks and expects that it works.
  void Run(const Task& task, const std::vector<std::shared_ptr<Buffers>>& buffers) {
    Outcomes outcomes(ranks());
    for (int r = 0; r < ranks(); ++r) Start(task, r, buffers[r], outcomes.For(r));
    for (const Status& status : outcomes.Wait()) ASSERT_TRUE(status.ok()) << status.message();
  }

  std::vector<Status> Run(const std::vector<Task>& task_of_rank) {
    Outcomes outcomes(ranks());
    for (int r = 0; r < ranks(); ++r) Start(task_of_rank[r], r, outcomes.For(r));
    return outcomes.Wait();
  }

  std::vector<Status> Run(const Task& task) { return Run(std::vector<Task>(ranks(), task)); }

  // `told` gets kOk when all have heard it, or when nobody needs to stay for them any more.
  void GiveUp(int rank, const std::string& reason, Done told, milliseconds linger = kPatience) {
    ranks_[rank]->GiveUp(reason, OpenFor(rank), linger, [told] { told(Status()); });
  }

  void AnnounceExit(int rank, const std::string& reason, Done told,
                    milliseconds linger = kPatience) {
    ranks_[rank]->AnnounceExit(reason, OpenFor(rank), linger, [told] { told(Status()); });
  }

  Status Watch(int rank) { return ranks_[rank]->Watch(OpenFor(rank)); }

 private:
  Open OpenFor(int rank) const {
    return [network = network_, traffic = traffic_, rank] {
      return std::make_shared<CountingChannel>(network->Open(rank), traffic);
    };
  }

  std::vector<std::shared_ptr<Communicator>> ranks_;
  const std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
  const std::shared_ptr<Network> network_;
};

}  // namespace tfscale

#endif  // TFSCALE_TESTS_NATIVE_WORLD_H_
