// The search for the best classes as a TensorFlow op.
#include <cstdint>
#include <limits>

#include "custom_ops/engine/pages.h"
#include "custom_ops/engine/text.h"
#include "custom_ops/kernels/workers.h"
#include "custom_ops/search/scan.h"
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
using tensorflow::shape_inference::ShapeHandle;

// For TensorFlow's choice of how many threads the work is worth.
constexpr int64_t kCyclesPerRow = 30;     // of codes, read at a random place
constexpr int64_t kCyclesPerValue = 130;  // of kMany samples, made a code

REGISTER_OP("TfscaleBestClasses")
    .Input("values: float")
    .Input("places: int32")
    .Attr("k: int >= 1")
    .Output("sums: float")
    .Output("classes: int32")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      int64_t k;
      ShapeHandle values, places;
      TF_RETURN_IF_ERROR(c->GetAttr("k", &k));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &values));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &places));
      c->set_output(0, c->Matrix(c->Dim(values, 1), k));
      c->set_output(1, c->Matrix(c->Dim(values, 1), k));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The k classes with the largest sums of values, for each sample, best first.

values: [repetitions, samples, buckets].
places: [classes, repetitions]: repetition * buckets + bucket.
)doc");

class BestClassesOp : public tensorflow::OpKernel {
 public:
  explicit BestClassesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("k", &k_));
  }

  void Compute(OpKernelContext* ctx) override {
    search::Problem problem;
    OP_REQUIRES_OK(ctx, Read(ctx, &problem));
    Tensor *sums, *classes, codes;
    const TensorShape shape({problem.samples, k_});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &sums));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, shape, &classes));
    if (problem.samples == 0) return;
    const int64_t bytes = search::CodeBytes(problem);
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), &codes));
    uint8_t* const rows = codes.flat<uint8_t>().data();
    AskForHugePages(rows, bytes);  // a random row needs an entry of the page table, too
    OP_REQUIRES(
        ctx,
        search::Best(problem, rows, sums->flat<float>().data(), classes->flat<int32_t>().data(),
                     OnWorkers(ctx, kCyclesPerValue * problem.buckets),
                     OnWorkers(ctx, kCyclesPerRow * problem.repetitions * search::kClassesOfPart)),
        absl::InvalidArgumentError(
            Text("TfscaleBestClasses: places has a place that is not one of the ", problem.buckets,
                 " buckets of its repetition")));
  }

 private:
  absl::Status Read(OpKernelContext* ctx, search::Problem* problem) const {
    const Tensor &values = ctx->input(0), &places = ctx->input(1);
    if (values.dims() != 3 || places.dims() != 2 || places.dim_size(1) != values.dim_size(0)) {
      return absl::InvalidArgumentError(
          Text("TfscaleBestClasses: values has shape ", values.shape().DebugString(),
               " and places ", places.shape().DebugString(),
               ", expected [repetitions,samples,buckets] and [classes,repetitions]"));
    }
    *problem = {values.flat<float>().data(),
                places.flat<int32_t>().data(),
                values.dim_size(0),
                values.dim_size(1),
                values.dim_size(2),
                places.dim_size(0),
                k_};
    if (problem->repetitions < 1 || problem->repetitions > search::kMostRepetitions ||
        problem->buckets < 1 || problem->buckets > kMost / problem->repetitions ||
        problem->classes > kMost || k_ > problem->classes) {
      return absl::InvalidArgumentError(Text("TfscaleBestClasses: k is ", k_, ", of ",
                                             problem->classes, " classes in ", problem->repetitions,
                                             " repetitions of ", problem->buckets,
                                             " buckets; expected at most all classes, and 1 to ",
                                             search::kMostRepetitions, " repetitions"));
    }
    return absl::OkStatus();
  }

  static constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  int64_t k_;
};

REGISTER_KERNEL_BUILDER(Name("TfscaleBestClasses").Device(tensorflow::DEVICE_CPU), BestClassesOp);

}  // namespace
}  // namespace tfscale
