// The resource that makes a device one rank of a group.
#ifndef TFSCALE_KERNELS_COMMUNICATOR_H_
#define TFSCALE_KERNELS_COMMUNICATOR_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "custom_ops/engine/communicator.h"
#include "custom_ops/transport/sockets/forming.h"
#include "custom_ops/transport/tensorflow.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace tfscale {

class CommunicatorResource : public tensorflow::ResourceBase {
 public:
  struct Config {
    int group_key = 0;
    int rank = 0;
    int deadline_ms = 0;
    int slow_after_ms = 0;
    std::vector<std::string> devices;  // in rank order, full names
    std::vector<std::string> peers;    // who they are, for messages
    sockets::Settings sockets;

    bool operator==(const Config& other) const {
      return group_key == other.group_key && rank == other.rank &&
             deadline_ms == other.deadline_ms && slow_after_ms == other.slow_after_ms &&
             devices == other.devices && peers == other.peers &&
             sockets.choice == other.sockets.choice;
    }
  };

  explicit CommunicatorResource(Config config)
      : config_(std::move(config)),
        engine_(Communicator::Make(config_.rank, config_.peers, PatienceOf(config_))) {
    engine_->JoinFamily(config_.group_key);
  }

  // Calls `ready` once the group is formed, or with the reason why it is not. The op that runs in
  // `ctx` must not end before; its channels may outlive it.
  using Ready = std::function<void(absl::Status, Open)>;
  void WhenFormed(tensorflow::OpKernelContext* ctx, Ready ready);

  // How messages go to each rank, once the group is formed; `why_not` says why not by sockets.
  std::vector<std::string> Ways(std::string* why_not) const;

  // What has been heard of ranks that gave up or are gone: see Communicator::Watch. Over sockets
  // only: there listening is free.
  Status Watch();

  bool is_formed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return group_ != nullptr;
  }

  const Config& config() const { return config_; }
  const std::shared_ptr<Communicator>& engine() const { return engine_; }
  std::string DebugString() const override;

 private:
  struct Waiting {
    tensorflow::OpKernelContext* ctx;
    Ready ready;
  };

  static Patience PatienceOf(const Config& config);
  void Connect(const Group& group, const Open& open);
  void Formed(const absl::Status& status, Group group, std::shared_ptr<sockets::Endpoint> endpoint);
  Open OpenFor(tensorflow::OpKernelContext* ctx) const;
  std::string Process(int rank) const;
  bool FirstOfItsProcess() const;

  const Config config_;
  const std::shared_ptr<Communicator> engine_;
  mutable std::mutex mutex_;  // of what follows
  Group group_;
  std::shared_ptr<sockets::Endpoint> endpoint_;  // or nothing: over TensorFlow's transport
  std::string why_not_;
  std::unique_ptr<sockets::Attempt> attempt_;  // to form the group, until it has ended
  std::vector<Waiting> waiting_;
};

}  // namespace tfscale

#endif  // TFSCALE_KERNELS_COMMUNICATOR_H_
