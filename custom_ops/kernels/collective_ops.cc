// The six collectives as TensorFlow ops: their inputs, attributes and shapes.
#include <limits>

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

// As many rows as this rank gets, where that is known.
absl::Status RoutedShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckOneValues(c));
  ShapeHandle x, y;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &x));
  for (int i = 3; i < 5; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &y));
  int64_t rows = 0;
  const tensorflow::Tensor* got = c->input_tensor(4);
  for (int64_t i = 0; got != nullptr && rows >= 0 && i < got->NumElements(); ++i) {
    const int64_t size = got->flat<int64_t>()(i);
    const bool possible = 0 <= size && size <= std::numeric_limits<int64_t>::max() - rows;
    rows = possible ? rows + size : -1;  // the kernel refuses it
  }
  const bool known = got != nullptr && rows >= 0;
  TF_RETURN_IF_ERROR(c->ReplaceDim(x, 0, known ? c->MakeDim(rows) : c->UnknownDim(), &y));
  c->set_output(0, y);
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

// Sends chunks of x to other ranks and gets chunks of theirs; nothing is summed.
// brings, gets: the chunks that lie in x and in y, in the order in which they lie there.
// brought, got: how many rows each of them has.
// ragged: whether other ranks know nothing of these sizes.
// detached: whether the op ends before others have taken what it sends.
TFSCALE_SENDING("TfscaleRoute")
    .Input("brought: int64")
    .Input("got: int64")
    .Output("y: T")
    .Attr(
        "T: {float, half, bfloat16, double, int32, int64, int8, uint8, int16, uint16, uint32, "
        "uint64, bool}")
    .Attr("brings: list(int)")
    .Attr("gets: list(int)")
    .Attr("ragged: bool = false")
    .Attr("detached: bool = false")
    .SetShapeFn(RoutedShape);

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
