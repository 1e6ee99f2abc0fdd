#include "custom_ops/kernels/communicator.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "custom_ops/engine/text.h"
#include "custom_ops/kernels/inputs.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/logging.h"

namespace tfscale {

std::string CommunicatorResource::DebugString() const {
  return Text("tfscale communicator: ", engine_->Describe(config_.rank), " of ",
              config_.peers.size(), " ranks, group ", config_.group_key);
}

Patience CommunicatorResource::PatienceOf(const Config& config) {
  return {std::chrono::milliseconds(config.deadline_ms),
          std::chrono::milliseconds(config.slow_after_ms),
          [](const std::string& warning) { LOG(WARNING) << "tfscale: " << warning; }};
}

namespace {

// A strategy makes several groups of the same ranks.
bool IsNews(const std::string& text) {
  static auto* mutex = new std::mutex;
  static auto* said = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(*mutex);
  return said->insert(text).second;
}

}  // namespace

void CommunicatorResource::WhenFormed(tensorflow::OpKernelContext* ctx, Ready ready) {
  if (ctx->collective_executor() == nullptr) {  // as in a Session
    return ready(absl::FailedPreconditionError(
                     Text(ctx->op_kernel().type_string(),
                          ": TensorFlow gave this function no collective executor; what talks to "
                          "other ranks runs eagerly or inside tf.function")),
                 nullptr);
  }
  bool formed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    formed = group_ != nullptr;
    if (!formed) {
      waiting_.push_back({ctx, std::move(ready)});
      if (waiting_.size() > 1) return;
    }
  }
  if (formed) return ready(absl::OkStatus(), OpenFor(ctx));
  Ref();
  FormGroup(ctx, config_.group_key, config_.devices, config_.deadline_ms / 1e3,
            [this, ctx](const absl::Status& status, Group group) {
              if (!status.ok()) return Formed(status, nullptr, nullptr);
              Connect(group, ChannelsOf(ctx, group, config_.rank));
            });
}

// TensorFlow's transport brings the ranks together; they may go on over sockets.
void CommunicatorResource::Connect(const Group& group, const Open& open) {
  std::thread([this, group, open] {
    const auto until = Clock::now() + std::chrono::milliseconds(config_.deadline_ms);
    if (attempt_ == nullptr) {
      attempt_ =
          std::make_unique<sockets::Attempt>(config_.rank, config_.peers, config_.sockets, open());
    }
    std::shared_ptr<sockets::Endpoint> endpoint;
    std::string why_not;
    const Status status = attempt_->Form(until, &endpoint, &why_not);
    if (!attempt_->open()) attempt_ = nullptr;
    if (!why_not.empty() && status.ok() && FirstOfItsProcess() && IsNews(why_not)) {
      engine_->patience().warn(
          "gradients go over TensorFlow's gRPC, which is slower than sockets, since " + why_not +
          ". transport='grpc' says so without this warning; docs/transports.md says what sockets "
          "need");
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      why_not_ = why_not;
    }
    Formed(ToAbsl(status), group, endpoint);
  }).detach();
}

void CommunicatorResource::Formed(const absl::Status& status, Group group,
                                  std::shared_ptr<sockets::Endpoint> endpoint) {
  std::vector<Waiting> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (status.ok()) group_ = std::move(group);
    endpoint_ = std::move(endpoint);
    waiting.swap(waiting_);
  }
  absl::Status outcome = status;
  if (!status.ok()) {
    outcome = KnownToAll(absl::Status(
        status.code(),
        Text(engine_->Describe(config_.rank), " could not join its group: ", status.message())));
  }
  for (auto& one : waiting) one.ready(outcome, status.ok() ? OpenFor(one.ctx) : nullptr);
  Unref();
}

Open CommunicatorResource::OpenFor(tensorflow::OpKernelContext* ctx) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (endpoint_ == nullptr) return ChannelsOf(ctx, group_, config_.rank);
  return [endpoint = endpoint_] { return endpoint->Open(); };
}

std::vector<std::string> CommunicatorResource::Ways(std::string* why_not) const {
  std::vector<std::string> ways;
  std::lock_guard<std::mutex> lock(mutex_);
  *why_not = why_not_;
  for (int rank = 0; rank < engine_->ranks() && group_ != nullptr; ++rank) {
    ways.push_back(rank == config_.rank                     ? "itself"
                   : endpoint_ != nullptr                   ? endpoint_->Way(rank)
                   : Process(rank) == Process(config_.rank) ? kWithinProcess
                                                            : "gRPC");
  }
  return ways;
}

Status CommunicatorResource::Watch() {
  std::shared_ptr<sockets::Endpoint> endpoint;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    endpoint = endpoint_;
  }
  return endpoint == nullptr ? Status() : engine_->Watch([endpoint] { return endpoint->Open(); });
}

std::string CommunicatorResource::Process(int rank) const {
  return config_.devices[rank].substr(0, config_.devices[rank].find("/device:"));
}

bool CommunicatorResource::FirstOfItsProcess() const {
  for (int rank = 0; rank < config_.rank; ++rank) {
    if (Process(rank) == Process(config_.rank)) return false;
  }
  return true;
}

namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("TfscaleCommunicator")
    .Output("communicator: resource")
    .Attr("group_key: int")
    .Attr("rank: int")
    .Attr("devices: list(string)")
    .Attr("peers: list(string)")
    .Attr("deadline_ms: int")
    .Attr("slow_after_ms: int >= 0")
    .Attr("transport: {'auto', 'sockets', 'grpc'} = 'grpc'")
    .Attr("host: string = ''")
    .Attr("first_port: int = 0")
    .Attr("last_port: int = 0")
    .Attr("streams: int >= 1 = 1")
    .Attr("shared_memory: bool = true")
    .Attr("shared_name: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Makes the device that runs it rank `rank` of the group of `devices`.

The communicator is one per device and `shared_name`; asking again gives the same.
devices: the full names of all devices, in rank order.
peers: who each rank is, for messages.
deadline_ms: how long a collective may wait without any progress.
slow_after_ms: after how long of that a warning names the ranks that are late; 0: never.
transport: what messages travel over: our own sockets, TensorFlow's gRPC, or sockets if they work.
host: the address of this process in the cluster, where sockets listen; empty if it is alone.
first_port, last_port: which ports they may listen at; 0: any.
streams: TCP connections of each pair of ranks.
shared_memory: whether processes of one host share memory.
)doc");

REGISTER_OP("TfscaleWays")
    .Input("communicator: resource")
    .Output("ways: string")
    .Output("why_not: string")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Scalar());
      return AreScalars(c, 0, 1);
    })
    .Doc(R"doc(
How messages go from this rank to each rank; empty before the group is formed.

why_not: why they do not go by sockets, though that was tried.
)doc");

class CommunicatorOp : public OpKernel {
 public:
  explicit CommunicatorOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("group_key", &config_.group_key));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &config_.rank));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("devices", &config_.devices));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("peers", &config_.peers));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("deadline_ms", &config_.deadline_ms));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slow_after_ms", &config_.slow_after_ms));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &name_));
    OP_REQUIRES_OK(ctx, ReadSockets(ctx));
    const int ranks = static_cast<int>(config_.devices.size());
    const bool valid = 0 <= config_.rank && config_.rank < ranks && config_.deadline_ms > 0;
    OP_REQUIRES(ctx, valid && config_.peers.size() == config_.devices.size(),
                absl::InvalidArgumentError(
                    Text("expected 0 <= rank < number of devices, as many peers as devices and "
                         "deadline_ms > 0, got rank ",
                         config_.rank, ", ", ranks, " devices, ", config_.peers.size(),
                         " peers, deadline_ms ", config_.deadline_ms)));
  }

  void Compute(OpKernelContext* ctx) override {
    CommunicatorResource* resource = nullptr;
    OP_REQUIRES_OK(ctx, ctx->resource_manager()->LookupOrCreate<CommunicatorResource>(
                            "tfscale", name_, &resource, [this](CommunicatorResource** made) {
                              *made = new CommunicatorResource(config_);
                              return absl::OkStatus();
                            }));
    tensorflow::core::ScopedUnref unref(resource);
    OP_REQUIRES(ctx, resource->config() == config_,
                absl::InvalidArgumentError(Text("communicator '", name_,
                                                "' exists already, with another group, rank, "
                                                "peers, deadline or slow_after: ",
                                                resource->DebugString(), "; choose another name")));
    tensorflow::Tensor* handle;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({}), &handle));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::MakeResourceHandle<CommunicatorResource>(ctx, "tfscale", name_);
  }

 private:
  absl::Status ReadSockets(OpKernelConstruction* ctx) {
    sockets::Settings& settings = config_.sockets;
    std::string transport;
    TF_RETURN_IF_ERROR(ctx->GetAttr("transport", &transport));
    TF_RETURN_IF_ERROR(ctx->GetAttr("host", &settings.host));
    TF_RETURN_IF_ERROR(ctx->GetAttr("first_port", &settings.first_port));
    TF_RETURN_IF_ERROR(ctx->GetAttr("last_port", &settings.last_port));
    TF_RETURN_IF_ERROR(ctx->GetAttr("streams", &settings.streams));
    const bool sound = 0 <= settings.first_port && settings.first_port <= settings.last_port &&
                       settings.last_port <= kMostPort && settings.streams <= kMostStreams;
    if (!sound) {
      return absl::InvalidArgumentError(
          Text("expected 0 <= first_port <= last_port <= ", kMostPort, " and at most ",
               kMostStreams, " streams, got first_port ", settings.first_port, ", last_port ",
               settings.last_port, ", streams ", settings.streams));
    }
    settings.choice = transport == "auto"      ? sockets::Choice::kAuto
                      : transport == "sockets" ? sockets::Choice::kSockets
                                               : sockets::Choice::kOther;
    return ctx->GetAttr("shared_memory", &settings.shared_memory);
  }

  static constexpr int kMostPort = 65535, kMostStreams = 64;

  CommunicatorResource::Config config_;
  std::string name_;
};

class WaysOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<CommunicatorResource> resource;
    OP_REQUIRES_OK(ctx, FindResource(ctx, 0, "communicator", &resource));
    std::string why_not;
    const std::vector<std::string> found = resource->Ways(&why_not);
    tensorflow::Tensor *ways, *why;
    const tensorflow::TensorShape shape({static_cast<int64_t>(found.size())});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &ways));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, tensorflow::TensorShape({}), &why));
    std::copy(found.begin(), found.end(), ways->flat<tensorflow::tstring>().data());
    why->scalar<tensorflow::tstring>()() = why_not;
  }
};

REGISTER_KERNEL_BUILDER(Name("TfscaleCommunicator").Device(tensorflow::DEVICE_CPU), CommunicatorOp);
REGISTER_KERNEL_BUILDER(
    Name("TfscaleCommunicator").Device(tensorflow::DEVICE_GPU).HostMemory("communicator"),
    CommunicatorOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleWays").Device(tensorflow::DEVICE_CPU), WaysOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleWays")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("communicator")
                            .HostMemory("ways")
                            .HostMemory("why_not"),
                        WaysOp);

}  // namespace
}  // namespace tfscale
