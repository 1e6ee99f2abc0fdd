// What holds an exchange that goes on behind steps, and the taking of its result.
#include <chrono>
#include <memory>
#include <utility>

#include "custom_ops/kernels/flight.h"
#include "custom_ops/kernels/inputs.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfscale {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TfscaleFlight")
    .Output("flight: resource")
    .Attr("most: int >= 1 = 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Holds what TfscaleBegin has begun, until TfscaleTake takes it; lives as its handle does.

most: how many results it holds.
)doc");

REGISTER_OP("TfscaleInFlight")
    .Input("flight: resource")
    .Output("held: int32")
    .Output("there: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 2; ++i) c->set_output(i, c->Scalar());
      return AreScalars(c, 0, 1);
    })
    .Doc(R"doc(
Counts the exchanges whose results can be taken.

held: all of them.
there: those, from the oldest on, that are over.
)doc");

REGISTER_OP("TfscaleDrop")
    .Input("flight: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return AreScalars(c, 0, 1); })
    .Doc("Forgets the exchanges whose results nobody has taken.");

REGISTER_OP("TfscaleTake")
    .Input("flight: resource")
    .Output("y: float")
    .Output("lost: lost_types")
    .Output("waited: double")
    .Output("took: double")
    .Attr("lost_types: list({float}) >= 0 = []")
    .Attr("shape: shape")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle shape;
      tensorflow::PartialTensorShape given;
      TF_RETURN_IF_ERROR(c->GetAttr("shape", &given));
      TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(given, &shape));
      for (int i = 0; i < c->num_outputs() - 2; ++i) c->set_output(i, shape);
      c->set_output(c->num_outputs() - 2, c->Scalar());
      c->set_output(c->num_outputs() - 1, c->Scalar());
      return AreScalars(c, 0, 1);
    })
    .Doc(R"doc(
Waits until the exchange that was begun is over, and gives its sum.

lost_types: one if the exchange has a residual. (A number of outputs would be an attribute by which
TensorFlow takes all memory.)
waited: how many seconds this op has waited.
took: how many seconds the exchange has taken since it was begun.
)doc");

class FlightOp : public tensorflow::OpKernel {
 public:
  explicit FlightOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("most", &most_));
  }

  void Compute(OpKernelContext* ctx) override {
    Tensor* handle;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &handle));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(new Flight(most_), ctx->device()->name());
  }

 private:
  int most_;
};

class InFlightOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Flight> flight;
    OP_REQUIRES_OK(ctx, FindResource(ctx, 0, "flight", &flight));
    const auto [held, there] = flight->Counts();
    const int counts[] = {held, there};
    for (int i = 0; i < 2; ++i) {
      Tensor* output;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, TensorShape({}), &output));
      output->scalar<int32_t>()() = counts[i];
    }
  }
};

class DropOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Flight> flight;
    OP_REQUIRES_OK(ctx, FindResource(ctx, 0, "flight", &flight));
    flight->Drop();
  }
};

class TakeOp : public tensorflow::AsyncOpKernel {
 public:
  explicit TakeOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    tensorflow::DataTypeVector lost_types;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("lost_types", &lost_types));
    residuals_ = static_cast<int>(lost_types.size());
    OP_REQUIRES(
        ctx, residuals_ <= 1,
        absl::InvalidArgumentError(Text("expected at most one residual, got ", residuals_)));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shape", &shape_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    tensorflow::core::RefCountPtr<Flight> found;
    OP_REQUIRES_OK_ASYNC(ctx, FindResource(ctx, 0, "flight", &found), done);
    const std::shared_ptr<Flight> flight = Shared(std::move(found));
    const Flight::ExchangePtr exchange = flight->Take();
    OP_REQUIRES_ASYNC(ctx, exchange != nullptr,
                      absl::FailedPreconditionError(
                          "no exchange was begun whose sum could be taken; each is taken once"),
                      done);
    tensorflow::CancellationManager* manager = ctx->cancellation_manager();
    const tensorflow::CancellationToken token = manager->get_cancellation_token();
    const bool registered =
        manager->RegisterCallback(token, [flight, exchange] { flight->Cancel(exchange); });
    const auto asked = Clock::now();
    flight->WhenOver(exchange, [this, ctx, exchange, manager, token, asked, done] {
      manager->TryDeregisterCallback(token);
      const double waited = std::chrono::duration<double>(Clock::now() - asked).count();
      OP_REQUIRES_OK_ASYNC(ctx, Give(ctx, exchange->result, waited), done);
      done();
    });
    if (!registered) flight->Cancel(exchange);
  }

 private:
  using Clock = std::chrono::steady_clock;

  absl::Status Give(OpKernelContext* ctx, const Flight::Result& result, double waited) const {
    TF_RETURN_IF_ERROR(result.status);
    const bool same_lost =
        residuals_ > 0 ? result.lost.shape() == shape_ : result.lost.NumElements() == 0;
    if (result.y.shape() != shape_ || !same_lost) {
      return absl::InvalidArgumentError(
          Text("what was begun has the shape ", result.y.shape().DebugString(),
               ", and what is to be taken ", shape_.DebugString(),
               residuals_ > 0 ? ", with" : ", without", " a residual"));
    }
    ctx->set_output(0, result.y);
    if (residuals_ > 0) ctx->set_output(1, result.lost);
    const double seconds[] = {waited, result.took};
    for (int i = 0; i < 2; ++i) {
      Tensor* output;
      TF_RETURN_IF_ERROR(ctx->allocate_output(1 + residuals_ + i, TensorShape({}), &output));
      output->scalar<double>()() = seconds[i];
    }
    return absl::OkStatus();
  }

  int residuals_ = 0;
  TensorShape shape_;
};

REGISTER_KERNEL_BUILDER(Name("TfscaleFlight").Device(tensorflow::DEVICE_CPU), FlightOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleFlight").Device(tensorflow::DEVICE_GPU).HostMemory("flight"),
                        FlightOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleInFlight").Device(tensorflow::DEVICE_CPU), InFlightOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleInFlight")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("flight")
                            .HostMemory("held")
                            .HostMemory("there"),
                        InFlightOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleDrop").Device(tensorflow::DEVICE_CPU), DropOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleDrop").Device(tensorflow::DEVICE_GPU).HostMemory("flight"),
                        DropOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleTake").Device(tensorflow::DEVICE_CPU), TakeOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleTake")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("flight")
                            .HostMemory("y")
                            .HostMemory("lost")
                            .HostMemory("waited")
                            .HostMemory("took"),
                        TakeOp);

}  // namespace
}  // namespace tfscale
