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
    .Output("label: string")
    .Output("owner: string")
    .Output("graph: string")
    .Output("number: int64")
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
    .Output("label: string")
    .Output("owner: string")
    .Output("graph: string")
    .Output("number: int64")
    .Output("calls: int64")
    .Output("sent: int64")
    .Output("microseconds: int64")
    .SetIsStateful()
    .SetShapeFn(ColumnsOfOneLength)
    .Doc("All collectives of this rank, added up for each bucket.");

constexpr int kBucketColumns = 4;

// Writes what `value` says of each row to one output.
template <typename T, typename Rows, typename Value>
absl::Status PutColumn(OpKernelContext* ctx, int output, const Rows& rows, Value value) {
  tensorflow::Tensor* column;
  const tensorflow::TensorShape shape({static_cast<int64_t>(rows.size())});
  TF_RETURN_IF_ERROR(ctx->allocate_output(output, shape, &column));
  std::transform(rows.begin(), rows.end(), column->flat<T>().data(), value);
  return absl::OkStatus();
}

// The first outputs: the bucket of each row.
template <typename Rows, typename Bucket>
absl::Status PutBuckets(OpKernelContext* ctx, const Rows& rows, Bucket bucket) {
  using tensorflow::tstring;
  const auto put = [&](int output, std::string BucketId::*field) {
    return PutColumn<tstring>(ctx, output, rows,
                              [&](const auto& row) -> tstring { return bucket(row).*field; });
  };
  TF_RETURN_IF_ERROR(put(0, &BucketId::label));
  TF_RETURN_IF_ERROR(put(1, &BucketId::owner));
  TF_RETURN_IF_ERROR(put(2, &BucketId::graph));
  return PutColumn<int64_t>(ctx, 3, rows, [&](const auto& row) { return bucket(row).number; });
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
      PutBuckets(ctx, rows, [](const auto& row) -> const BucketId& { return row.bucket; }));
  const auto put = [&](int column, int64_t Execution::*field) {
    return PutColumn<int64_t>(ctx, kBucketColumns + column, rows,
                              [field](const Execution& row) { return row.*field; });
  };
  TF_RETURN_IF_ERROR(put(0, &Execution::start));
  TF_RETURN_IF_ERROR(put(1, &Execution::end));
  return put(2, &Execution::sent);
}

absl::Status PutTotals(OpKernelContext* ctx, const Log& log) {
  const auto rows = log.Totals();
  TF_RETURN_IF_ERROR(
      PutBuckets(ctx, rows, [](const auto& row) -> const BucketId& { return row.first; }));
  const auto put = [&](int column, int64_t Log::Total::*field) {
    return PutColumn<int64_t>(ctx, kBucketColumns + column, rows,
                              [field](const auto& row) { return row.second.*field; });
  };
  TF_RETURN_IF_ERROR(put(0, &Log::Total::calls));
  TF_RETURN_IF_ERROR(put(1, &Log::Total::sent));
  return put(2, &Log::Total::microseconds);
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
                            .HostMemory("label")
                            .HostMemory("owner")
                            .HostMemory("graph")
                            .HostMemory("number")
                            .HostMemory("start")
                            .HostMemory("end")
                            .HostMemory("sent"),
                        LogOp<PutExecutions>);
REGISTER_KERNEL_BUILDER(Name("TfscaleTotals").Device(tensorflow::DEVICE_CPU), LogOp<PutTotals>);
REGISTER_KERNEL_BUILDER(Name("TfscaleTotals")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("communicator")
                            .HostMemory("label")
                            .HostMemory("owner")
                            .HostMemory("graph")
                            .HostMemory("number")
                            .HostMemory("calls")
                            .HostMemory("sent")
                            .HostMemory("microseconds"),
                        LogOp<PutTotals>);

}  // namespace
}  // namespace tfscale
