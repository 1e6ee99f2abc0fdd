#include "custom_ops/transport/tensorflow.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/engine/text.h"
#include "custom_ops/engine/watchdog.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/device.h"

namespace tfscale {
namespace {

using tensorflow::AllocatorAttributes;
using tensorflow::CancellationManager;
using tensorflow::CollectiveExecutor;
using tensorflow::CollectiveExecutorMgrInterface;
using tensorflow::CollGroupMember;
using tensorflow::CollGroupParams;
using tensorflow::Tensor;

// TensorFlow moves tensors: this one shows memory that somebody else owns.
class Window : public tensorflow::TensorBuffer {
 public:
  explicit Window(View view) : TensorBuffer(view.data), view_(std::move(view)) {}
  size_t size() const override { return view_.size; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription* proto) const override {
    proto->set_requested_bytes(static_cast<int64_t>(view_.size));
    proto->set_allocator_name("tfscale");
  }
  bool OwnsMemory() const override { return false; }

 private:
  const View view_;
};

std::shared_ptr<Tensor> Show(View view) {
  const tensorflow::TensorShape shape({static_cast<int64_t>(view.size)});
  auto* window = new Window(std::move(view));
  auto tensor = std::make_shared<Tensor>(tensorflow::DT_UINT8, shape, window);
  window->Unref();  // the tensor holds it now
  return tensor;
}

Status FromAbsl(const absl::Status& status) {
  if (status.ok()) return Status();
  const std::string message(status.message());
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      return Status(Code::kUnavailable, message);
    case absl::StatusCode::kCancelled:
      return Status(Code::kCancelled, message);
    case absl::StatusCode::kDeadlineExceeded:
      return Status(Code::kDeadlineExceeded, message);
    case absl::StatusCode::kInvalidArgument:
      return Status(Code::kInvalidArgument, message);
    default:
      return Status(Code::kInternal, status.ToString());
  }
}

// Where an op runs: all that moving its tensors takes.
class Place {
 public:
  Place(tensorflow::OpKernelContext* ctx, Group group, int rank)
      : executor(ctx->collective_executor()),
        device(static_cast<tensorflow::Device*>(ctx->device())),
        device_context(ctx->op_device_context()),
        group(std::move(group)),
        rank(rank) {
    executor->Ref();
    if (device_context != nullptr) device_context->Ref();
    on_host.set_on_host(true);
  }
  ~Place() {
    if (device_context != nullptr) device_context->Unref();
    executor->Unref();
  }

  CollectiveExecutor* const executor;
  tensorflow::Device* const device;
  tensorflow::DeviceContext* const device_context;
  const Group group;
  const int rank;
  AllocatorAttributes on_host;
};

class TensorFlowChannel : public Channel, public std::enable_shared_from_this<TensorFlowChannel> {
 public:
  explicit TensorFlowChannel(std::shared_ptr<const Place> place) : place_(std::move(place)) {}

  void Post(int to, const Key& key, View bytes, Done done) override {
    auto tensor = Show(std::move(bytes));
    const Place& at = *place_;
    const CollGroupMember& peer = at.group->members[to];
    at.executor->remote_access()->PostToPeer(peer.device.name(), peer.task, Name(key, at.rank, to),
                                             at.device, at.device_context, at.on_host, tensor.get(),
                                             at.device->attributes().locality(), &cancellation_,
                                             Hold(tensor, std::move(done)));
  }

  void Receive(int from, const Key& key, View into, Taken done) override {
    if (into.data == nullptr) into = BufferPool::OfProcess().Get(into.size);
    auto tensor = Show(into);
    const Place& at = *place_;
    const CollGroupMember& peer = at.group->members[from];
    at.executor->remote_access()->RecvFromPeer(
        peer.device.name(), peer.task, peer.is_local, Name(key, from, at.rank), at.device,
        at.device_context, at.on_host, tensor.get(), at.device->attributes().locality(), 0,
        &cancellation_, Hold(tensor, [tensor, into, done = std::move(done)](Status status) {
          // For a GPU, TensorFlow receives into memory of its own.
          const char* received = tensor->tensor_data().data();
          if (status.ok() && received != reinterpret_cast<const char*>(into.data)) {
            std::memcpy(into.data, received, into.size);
          }
          done(std::move(status), into);
        }));
  }

  void Cancel() override {
    auto self = shared_from_this();
    cancellation_.StartCancel();
  }

 private:
  // TensorFlow keeps plain pointers to the tensor and to the cancellation
  // manager until it calls back.
  tensorflow::StatusCallback Hold(std::shared_ptr<Tensor> tensor, Done done) {
    return [self = shared_from_this(), tensor = std::move(tensor),
            done = std::move(done)](const absl::Status& status) { done(FromAbsl(status)); };
  }

  std::string Name(const Key& key, int from, int to) const {
    char name[160];
    std::snprintf(name, sizeof(name), "tfscale:%d:%llx:%x:%x:%x:%x:%x-%x:%x>%x",
                  place_->group->group_key, static_cast<unsigned long long>(key.collective),
                  key.generation, key.execution, key.part, key.kind, key.first, key.last, from, to);
    return name;
  }

  const std::shared_ptr<const Place> place_;
  CancellationManager cancellation_;
};

// The wait for a group. When its time has come it says so and leaves the request
// to TensorFlow: cancelled, the group could never be formed again.
class Formation : public Watched {
 public:
  using Say = std::function<void(absl::Status, Group)>;

  Formation(double seconds, size_t ranks, Say say)
      : seconds_(seconds),
        ranks_(ranks),
        at_(Clock::now() +
            std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))),
        say_(std::move(say)) {}

  void End(const absl::Status& status, Group group) {
    if (!said_.exchange(true)) say_(status, std::move(group));
  }

  void Tick(Clock::time_point now) override {
    if (now < at_) return;
    End(absl::DeadlineExceededError(
            Text("not all ", ranks_, " ranks came together within ", seconds_, " s")),
        nullptr);
  }

  CancellationManager never_cancelled;

 private:
  const double seconds_;
  const size_t ranks_;
  const Clock::time_point at_;
  const Say say_;
  std::atomic<bool> said_{false};
};

// The manager knows the device resolver; the executor keeps it to its family.
struct Relative : CollectiveExecutor {
  static CollectiveExecutorMgrInterface* Manager(CollectiveExecutor* executor) {
    return executor->*(&Relative::cem_);
  }
};

// After a group is complete the devices of other hosts are known by name only;
// moving tensors needs their attributes.
absl::Status IntroduceDevices(CollectiveExecutor* executor, const CollGroupParams& group) {
  std::vector<tensorflow::DeviceAttributes> devices;
  bool all_local = true;
  for (const CollGroupMember& member : group.members) {
    devices.push_back(member.device);
    all_local = all_local && member.is_local;
  }
  if (all_local) return absl::OkStatus();
  return Relative::Manager(executor)->GetDeviceResolver()->UpdateDeviceAttributes(devices);
}

// TensorFlow orders the members its own way.
absl::Status PutInRankOrder(const std::vector<std::string>& devices, CollGroupParams* group) {
  std::map<std::string, CollGroupMember> members;
  for (const CollGroupMember& member : group->members) members[member.device.name()] = member;
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    const auto found = members.find(devices[rank]);
    if (found == members.end() || members.size() != devices.size()) {
      return absl::InvalidArgumentError(Text("rank ", rank, " should be ", devices[rank],
                                             ", which is not in the group of ", members.size(),
                                             " devices that came together"));
    }
    group->members[rank] = found->second;
  }
  return absl::OkStatus();
}

}  // namespace

void FormGroup(tensorflow::OpKernelContext* ctx, int group_key,
               const std::vector<std::string>& devices, double seconds,
               std::function<void(absl::Status, Group)> done) {
  CollectiveExecutor* executor = ctx->collective_executor();
  auto group = std::make_shared<CollGroupParams>();
  group->group_key = group_key;
  group->group_size = static_cast<int>(devices.size());
  group->device_type = tensorflow::DeviceType(ctx->device()->attributes().device_type());
  auto formation = std::make_shared<Formation>(seconds, devices.size(), std::move(done));
  Watchdog::Get().Watch(formation);
  const tensorflow::DeviceAttributes device = ctx->device()->attributes();
  executor->Ref();
  executor->RunClosure([=] {
    executor->CompleteGroupAsync(device, group.get(), &formation->never_cancelled,
                                 [=](const absl::Status& completed) {
                                   absl::Status status = completed;
                                   if (status.ok()) status = IntroduceDevices(executor, *group);
                                   if (status.ok()) status = PutInRankOrder(devices, group.get());
                                   formation->End(status, status.ok() ? group : nullptr);
                                   executor->Unref();
                                 });
  });
}

std::function<std::shared_ptr<Channel>()> ChannelsOf(tensorflow::OpKernelContext* ctx, Group group,
                                                     int rank) {
  auto place = std::make_shared<const Place>(ctx, std::move(group), rank);
  return [place] { return std::make_shared<TensorFlowChannel>(place); };
}

absl::Status KnownToAll(absl::Status status) {
  status.SetPayload("tfscale/known-to-all", absl::Cord("1"));
  return status;
}

absl::Status ToAbsl(const Status& status) {
  if (status.known_to_all()) {
    return KnownToAll(ToAbsl(Status(status.code(), status.message())));
  }
  switch (status.code()) {
    case Code::kOk:
      return absl::OkStatus();
    case Code::kInvalidArgument:
      return absl::InvalidArgumentError(status.message());
    case Code::kUnavailable:
      return absl::UnavailableError(status.message());
    case Code::kDeadlineExceeded:
      return absl::DeadlineExceededError(status.message());
    case Code::kCancelled:
      return absl::CancelledError(status.message());
    default:
      return absl::InternalError(status.message());
  }
}

}  // namespace tfscale
