// What a communicator ran, as tensors.
#include <algorithm>
#include <string>

#include "custom_ops/kernels/communicator.h"
#include "custom_ops/kernels/inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfscale {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::shape_inference::InferenceContext;

absl::Status ColumnsOfOneLength(InferenceContext* c) {
  TF_RETURN_IF_ERROR(AreScalars(c, 0, c->num_inputs()));
  const auto column = c->Vector(c->UnknownDim());
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, column);
  return absl::OkStatus();
}

REGISTER_OP("TfscaleExecutions")
    .Input("communicator: resource")
    .Input("most: int64")
    .Output("bucket: string")
    .Output("start: int64")
    .Output("end: int64")
    .Output("sent: int64")
    .SetIsStateful()
    .SetShapeFn(ColumnsOfOneLength)
    .Doc(
        "The last collectives of this rank, `most` or fewer; times in microseconds of the wall "
        "clock.");

REGISTER_OP("TfscaleTotals")
    .Input("communicator: resource")
    .Output("bucket: string")
    .Output("calls: int64")
    .Output("sent: int64")
    .Output("microseconds: int64")
    .SetIsStateful()
    .SetShapeFn(ColumnsOfOneLength)
    .Doc("All collectives of this rank, added up for each bucket.");

// Writes what `value` says of each row to one output.
template <typename T, typename Rows, typename Value>
absl::Status PutColumn(OpKernelContext* ctx, int output, const Rows& rows, Value value) {
  tensorflow::Tensor* column;
  const tensorflow::TensorShape shape({static_cast<int64_t>(rows.size())});
  TF_RETURN_IF_ERROR(ctx->allocate_output(output, shape, &column));
  std::transform(rows.begin(), rows.end(), column->flat<T>().data(), value);
  return absl::OkStatus();
}

absl::Status PutExecutions(OpKernelContext* ctx, const Log& log) {
  int64_t most;
  TF_RETURN_IF_ERROR(ReadOne(ctx, 1, "most", &most));
  if (most < 0) {
    return absl::InvalidArgumentError(
        Text("TfscaleExecutions: most is a number that is 0 or above, got ", most));
  }
  const auto rows = log.Executions(most);
  TF_RETURN_IF_ERROR(
      PutColumn<tensorflow::tstring>(ctx, 0, rows, [](const auto& row) { return row.bucket; }));
  TF_RETURN_IF_ERROR(PutColumn<int64_t>(ctx, 1, rows, [](const auto& row) { return row.start; }));
  TF_RETURN_IF_ERROR(PutColumn<int64_t>(ctx, 2, rows, [](const auto& row) { return row.end; }));
  return PutColumn<int64_t>(ctx, 3, rows, [](const auto& row) { return row.sent; });
}

absl::Status PutTotals(OpKernelContext* ctx, const Log& log) {
  const auto rows = log.Totals();
  TF_RETURN_IF_ERROR(
      PutColumn<tensorflow::tstring>(ctx, 0, rows, [](const auto& row) { return row.first; }));
  TF_RETURN_IF_ERROR(
      PutColumn<int64_t>(ctx, 1, rows, [](const auto& row) { return row.second.calls; }));
  TF_RETURN_IF_ERROR(
      PutColumn<int64_t>(ctx, 2, rows, [](const auto& row) { return row.second.sent; }));
  return PutColumn<int64_t>(ctx, 3, rows, [](const auto& row) { return row.second.microseconds; });
}

template <absl::Status (*Put)(OpKernelContext*, const Log&)>
class LogOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<CommunicatorResource> resource;
    OP_REQUIRES_OK(ctx, FindResource(ctx, 0, "communicator", &resource));
    OP_REQUIRES_OK(ctx, Put(ctx, resource->engine()->log()));
  }
};

REGISTER_KERNEL_BUILDER(Name("TfscaleExecutions").Device(tensorflow::DEVICE_CPU),
                        LogOp<PutExecutions>);
REGISTER_KERNEL_BUILDER(Name("TfscaleExecutions")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("communicator")
                            .HostMemory("most")
                            .HostMemory("bucket")
                            .HostMemory("start")
                            .HostMemory("end")
                            .HostMemory("sent"),
                        LogOp<PutExecutions>);
REGISTER_KERNEL_BUILDER(Name("TfscaleTotals").Device(tensorflow::DEVICE_CPU), LogOp<PutTotals>);
REGISTER_KERNEL_BUILDER(Name("TfscaleTotals")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("communicator")
                            .HostMemory("bucket")
                            .HostMemory("calls")
                            .HostMemory("sent")
                            .HostMemory("microseconds"),
                        LogOp<PutTotals>);

}  // namespace
}  // namespace tfscale
