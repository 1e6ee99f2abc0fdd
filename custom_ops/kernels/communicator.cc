#include "custom_ops/kernels/communicator.h"

#include <utility>

#include "custom_ops/engine/text.h"
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

void CommunicatorResource::WhenFormed(tensorflow::OpKernelContext* ctx, Ready ready) {
  Group group;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group = group_;
    if (group == nullptr) {
      waiting_.push_back(std::move(ready));
      if (waiting_.size() > 1) return;
    }
  }
  if (group != nullptr) return ready(absl::OkStatus(), group);
  Ref();
  FormGroup(ctx, config_.group_key, config_.devices, config_.deadline_ms / 1e3,
            [this](const absl::Status& status, Group formed) {
              Formed(status, std::move(formed));
              Unref();
            });
}

void CommunicatorResource::Formed(const absl::Status& status, Group group) {
  std::vector<Ready> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group_ = group;
    waiting.swap(waiting_);
  }
  absl::Status outcome = status;
  if (!status.ok()) {
    outcome = KnownToAll(absl::Status(
        status.code(),
        Text(engine_->Describe(config_.rank), " could not join its group: ", status.message())));
  }
  for (auto& ready : waiting) ready(outcome, group);
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
  CommunicatorResource::Config config_;
  std::string name_;
};

REGISTER_KERNEL_BUILDER(Name("TfscaleCommunicator").Device(tensorflow::DEVICE_CPU), CommunicatorOp);
REGISTER_KERNEL_BUILDER(
    Name("TfscaleCommunicator").Device(tensorflow::DEVICE_GPU).HostMemory("communicator"),
    CommunicatorOp);

}  // namespace
}  // namespace tfscale
