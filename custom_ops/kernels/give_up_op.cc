// A farewell on demand: a step that failed where no collective was running.
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "custom_ops/kernels/communicator.h"
#include "custom_ops/kernels/inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfscale {
namespace {

using tensorflow::OpKernelContext;

absl::Status OneValues(tensorflow::shape_inference::InferenceContext* c) {
  return AreScalars(c, 0, c->num_inputs());
}

REGISTER_OP("TfscaleJoin")
    .Input("communicator: resource")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(OneValues)
    .Doc("Waits until all ranks of the group have come together.");

REGISTER_OP("TfscaleGiveUp")
    .Input("communicator: resource")
    .Input("reason: string")
    .Input("linger: double")
    .Attr("exits: bool = false")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(OneValues)
    .Doc(R"doc(
Tells all ranks that this one's step has failed: they give up theirs for `reason`.

linger: how many seconds to wait, at the longest, until all have heard it.
exits: this rank's program ends. Others give up only what needs it; where the ranks have not come
  together, nobody is told.
)doc");

REGISTER_OP("TfscaleWatch")
    .Input("communicator: resource")
    .Output("code: int32")
    .Output("why: string")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return AreScalars(c, 0, 1);
    })
    .Doc(R"doc(
Whether a rank has given up or is gone, though no collective of this op library runs.

code: of TensorFlow's error; 0 if all are well, or if nothing tells: over gRPC, or before all ranks
have come together.
why: in words.
)doc");

class JoinOp : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    tensorflow::core::RefCountPtr<CommunicatorResource> resource;
    OP_REQUIRES_OK_ASYNC(ctx, FindResource(ctx, 0, "communicator", &resource), done);
    Action then;
    OP_REQUIRES_OK_ASYNC(ctx, Read(ctx, &then), done);
    const auto engine = resource->engine();
    if (engine->ranks() == 1 || !Concerns(*resource)) return done();
    resource->WhenFormed(ctx, [=](const absl::Status& status, const Open& open) {
      OP_REQUIRES_OK_ASYNC(ctx, status, done);
      then(engine, open, done);
    });
  }

 protected:
  // What is done once all have come together.
  using Action =
      std::function<void(const std::shared_ptr<Communicator>&, const Open&, DoneCallback)>;

 private:
  virtual bool Concerns(const CommunicatorResource&) const { return true; }

  // Makes an action of the inputs; it runs while the op does.
  virtual absl::Status Read(OpKernelContext*, Action* then) const {
    *then = [](const auto&, const Open&, const DoneCallback& done) { done(); };
    return absl::OkStatus();
  }
};

class GiveUpOp : public JoinOp {
 public:
  explicit GiveUpOp(tensorflow::OpKernelConstruction* ctx) : JoinOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("exits", &exits_));
  }

 private:
  bool Concerns(const CommunicatorResource& resource) const override {
    return !exits_ || resource.is_formed();
  }

  absl::Status Read(OpKernelContext* ctx, Action* then) const override {
    tensorflow::tstring reason;
    double linger;
    TF_RETURN_IF_ERROR(ReadOne(ctx, 1, "reason", &reason));
    TF_RETURN_IF_ERROR(ReadOne(ctx, 2, "linger", &linger));
    if (!(0 <= linger && linger <= kLongest)) {
      return absl::InvalidArgumentError(Text(
          "TfscaleGiveUp: linger is a number of seconds from 0 to ", kLongest, ", got ", linger));
    }
    const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::duration<double>(linger));
    const auto tell =
        exits_ ? &Communicator::AnnounceExit : static_cast<Telling>(&Communicator::GiveUp);
    *then = [reason = std::string(reason), time, tell](const auto& engine, const Open& open,
                                                       const DoneCallback& done) {
      ((*engine).*tell)(reason, open, time,
                        [engine, done] { done(); });  // the engine lives until then
    };
    return absl::OkStatus();
  }

  using Telling = void (Communicator::*)(const std::string&, const Open&, std::chrono::milliseconds,
                                         std::function<void()>);
  bool exits_;

  static constexpr double kLongest = 86400;  // of a duration not every number can be made
};

class WatchOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<CommunicatorResource> resource;
    OP_REQUIRES_OK(ctx, FindResource(ctx, 0, "communicator", &resource));
    const absl::Status heard = ToAbsl(resource->Watch());
    tensorflow::Tensor *code, *why;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({}), &code));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, tensorflow::TensorShape({}), &why));
    code->scalar<int32_t>()() = static_cast<int32_t>(heard.code());
    why->scalar<tensorflow::tstring>()() = std::string(heard.message());
  }
};

REGISTER_KERNEL_BUILDER(Name("TfscaleWatch").Device(tensorflow::DEVICE_CPU), WatchOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleWatch")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("communicator")
                            .HostMemory("code")
                            .HostMemory("why"),
                        WatchOp);
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
