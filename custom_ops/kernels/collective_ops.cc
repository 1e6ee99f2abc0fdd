// The five collectives as TensorFlow ops: their inputs, attributes and shapes.
#include "custom_ops/kernels/inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfscale {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Inputs are the communicator, x, the seed and perhaps the residual.
absl::Status CheckOneValues(InferenceContext* c) {
  TF_RETURN_IF_ERROR(AreScalars(c, 0, 1));
  return AreScalars(c, 2, 3);
}

absl::Status SameShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckOneValues(c));
  c->set_output(0, c->input(1));
  for (int i = 3; i < c->num_inputs(); ++i) c->set_output(i - 2, c->input(1));
  return absl::OkStatus();
}

// The first dimension is divided or multiplied by the number of ranks.
absl::Status ResizedShape(InferenceContext* c, bool grows) {
  TF_RETURN_IF_ERROR(CheckOneValues(c));
  int ranks;
  TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
  ShapeHandle x, y;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &x));
  DimensionHandle first;
  if (grows) {
    TF_RETURN_IF_ERROR(c->Multiply(c->Dim(x, 0), ranks, &first));
  } else {
    TF_RETURN_IF_ERROR(c->Divide(c->Dim(x, 0), ranks, /*evenly_divisible=*/true, &first));
  }
  TF_RETURN_IF_ERROR(c->ReplaceDim(x, 0, first, &y));
  c->set_output(0, y);
  for (int i = 3; i < c->num_inputs(); ++i) c->set_output(i - 2, x);
  return absl::OkStatus();
}

// Stateful with a resource: neither pruned nor merged, and in program order
// per communicator unless Python says that they may overlap.
#define TFSCALE_COLLECTIVE(NAME) \
  TFSCALE_SENDING(NAME).Output("y: T").Attr("T: {float, half, bfloat16, double, int32, int64}")
#define TFSCALE_SENDING(NAME)            \
  REGISTER_OP(NAME)                      \
      .Input("communicator: resource")   \
      .Input("x: T")                     \
      .Input("seed: int64")              \
      .Attr("bucket: string")            \
      .Attr("bucket_owner: string = ''") \
      .Attr("bucket_graph: string = ''") \
      .Attr("bucket_number: int = 0")    \
      .Attr("wire: string = 'fp32'")     \
      .Attr("stochastic: bool = false")  \
      .Attr("schedule: string")          \
      .Attr("ranks: int")                \
      .Attr("rank: int")                 \
      .Attr("chunks: int")               \
      .Attr("program: list(int)")        \
      .Attr("piece_bytes: int = 0")      \
      .SetIsStateful()                   \
      .SetIsDistributedCommunication()

TFSCALE_COLLECTIVE("TfscaleAllReduce")
    .Input("residual: R * float")
    .Output("new_residual: R * float")
    .Attr("R: int >= 0 = 0")
    .Attr("reduction: {'sum', 'mean'} = 'sum'")
    .SetShapeFn(SameShape);

TFSCALE_COLLECTIVE("TfscaleReduceScatter")
    .Input("residual: R * float")
    .Output("new_residual: R * float")
    .Attr("R: int >= 0 = 0")
    .Attr("reduction: {'sum', 'mean'} = 'sum'")
    .SetShapeFn([](InferenceContext* c) { return ResizedShape(c, false); });

TFSCALE_COLLECTIVE("TfscaleAllGather").SetShapeFn([](InferenceContext* c) {
  return ResizedShape(c, true);
});

TFSCALE_COLLECTIVE("TfscaleBroadcast").SetShapeFn(SameShape);

TFSCALE_COLLECTIVE("TfscaleMix").SetShapeFn(SameShape);

// Like TfscaleAllReduce, but returns at once: TfscaleTake gives the sum.
TFSCALE_SENDING("TfscaleBegin")
    .Attr("T: {float}")
    .Input("residual: R * float")
    .Input("flight: resource")
    .Attr("R: int >= 0 = 0")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckOneValues(c));
      return AreScalars(c, c->num_inputs() - 1, c->num_inputs());
    });

#undef TFSCALE_SENDING
#undef TFSCALE_COLLECTIVE

}  // namespace
}  // namespace tfscale
