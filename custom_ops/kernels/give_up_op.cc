// A farewell on demand: a step that failed where no collective was running.
#include <string>

#include "custom_ops/kernels/communicator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfscale {
namespace {

using tensorflow::OpKernelContext;

REGISTER_OP("TfscaleJoin")
    .Input("communicator: resource")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Waits until all ranks of the group have come together.");

REGISTER_OP("TfscaleGiveUp")
    .Input("communicator: resource")
    .Input("reason: string")
    .Input("linger: double")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Tells all ranks that this one's step has failed: they give up theirs for `reason`.

linger: how many seconds to wait, at the longest, until all have heard it.
)doc");

class JoinOp : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    CommunicatorResource* found = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &found),
                         done);
    tensorflow::core::RefCountPtr<CommunicatorResource> resource(found);
    const auto engine = resource->engine();
    if (engine->ranks() == 1) return done();
    resource->WhenFormed(ctx, [=](const absl::Status& status, Group group) {
      OP_REQUIRES_OK_ASYNC(ctx, status, done);
      Joined(ctx, engine, std::move(group), done);
    });
  }

 private:
  virtual void Joined(OpKernelContext*, const std::shared_ptr<Communicator>&, Group,
                      const DoneCallback& done) {
    done();
  }
};

class GiveUpOp : public JoinOp {
 public:
  using JoinOp::JoinOp;

 private:
  void Joined(OpKernelContext* ctx, const std::shared_ptr<Communicator>& engine, Group group,
              const DoneCallback& done) override {
    const std::string reason(ctx->input(1).scalar<tensorflow::tstring>()());
    const auto linger = std::chrono::duration<double>(ctx->input(2).scalar<double>()());
    engine->GiveUp(reason, ChannelsOf(ctx, std::move(group), engine->rank()),
                   std::chrono::duration_cast<std::chrono::milliseconds>(linger),
                   [engine, done] { done(); });  // the engine lives until then
  }
};

REGISTER_KERNEL_BUILDER(Name("TfscaleJoin").Device(tensorflow::DEVICE_CPU), JoinOp);
REGISTER_KERNEL_BUILDER(
    Name("TfscaleJoin").Device(tensorflow::DEVICE_GPU).HostMemory("communicator"), JoinOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleGiveUp").Device(tensorflow::DEVICE_CPU), GiveUpOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleGiveUp")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("communicator")
                            .HostMemory("reason")
                            .HostMemory("linger"),
                        GiveUpOp);

}  // namespace
}  // namespace tfscale
