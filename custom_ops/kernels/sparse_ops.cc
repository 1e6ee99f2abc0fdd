// The largest numbers of vectors, and sums of numbers at places, as TensorFlow ops.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "custom_ops/engine/text.h"
#include "custom_ops/sparse/select.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tfscale {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr int64_t kCyclesPerPart = 1 << 16;

int64_t Sum(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

REGISTER_OP("TfscaleLargest")
    .Input("x: float")
    .Attr("sizes: list(int)")
    .Attr("counts: list(int)")
    .Output("places: int32")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle vector;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
      std::vector<int64_t> counts;
      TF_RETURN_IF_ERROR(c->GetAttr("counts", &counts));
      c->set_output(0, c->Vector(Sum(counts)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The places of the largest numbers by magnitude of each part of a vector, ascending.

sizes: of the parts, which follow each other.
counts: how many places of each part.
)doc");

REGISTER_OP("TfscaleSumAt")
    .Input("values: float")
    .Input("places: int32")
    .Attr("size: int")
    .Output("sums: float")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle vector;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
      TF_RETURN_IF_ERROR(c->Merge(vector, c->input(1), &vector));
      int64_t size;
      TF_RETURN_IF_ERROR(c->GetAttr("size", &size));
      c->set_output(0, c->Vector(size));
      return absl::OkStatus();
    })
    .Doc(R"doc(
A vector of zeros to which values are added at places, one after the other.
)doc");

class LargestOp : public tensorflow::OpKernel {
 public:
  explicit LargestOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("counts", &counts_));
    OP_REQUIRES(ctx, sizes_.size() == counts_.size(),
                absl::InvalidArgumentError(Text("TfscaleLargest: ", sizes_.size(), " sizes and ",
                                                counts_.size(), " counts")));
    for (size_t i = 0; i < sizes_.size(); ++i) {
      OP_REQUIRES(ctx, 0 <= counts_[i] && counts_[i] <= sizes_[i],
                  absl::InvalidArgumentError(Text("TfscaleLargest: ", counts_[i], " of ", sizes_[i],
                                                  " numbers cannot be chosen")));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    OP_REQUIRES(ctx, x.NumElements() == Sum(sizes_) && x.NumElements() <= kMost,
                absl::InvalidArgumentError(Text("TfscaleLargest: got ", x.NumElements(),
                                                " numbers, expected ", Sum(sizes_),
                                                ", and at most ", kMost)));
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({Sum(counts_)}), &output));
    auto* workers = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    const sparse::Runner run = [workers](int64_t parts, const auto& work) {
      workers->ParallelFor(parts, kCyclesPerPart, work);
    };
    const float* numbers = x.flat<float>().data();
    int32_t* places = output->flat<int32_t>().data();
    int64_t offset = 0;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      sparse::Largest(numbers + offset, sizes_[i], counts_[i], static_cast<int32_t>(offset), places,
                      run);
      offset += sizes_[i];
      places += counts_[i];
    }
  }

 private:
  static constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  std::vector<int64_t> sizes_, counts_;
};

class SumAtOp : public tensorflow::OpKernel {
 public:
  explicit SumAtOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("size", &size_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &values = ctx->input(0), &places = ctx->input(1);
    OP_REQUIRES(ctx, values.NumElements() == places.NumElements(),
                absl::InvalidArgumentError(Text("TfscaleSumAt: ", values.NumElements(),
                                                " values for ", places.NumElements(), " places")));
    Tensor* sums;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({size_}), &sums));
    float* numbers = sums->flat<float>().data();
    std::fill_n(numbers, size_, 0.0f);
    OP_REQUIRES(ctx,
                sparse::Add(values.flat<float>().data(), places.flat<int32_t>().data(),
                            places.NumElements(), numbers, size_),
                absl::InvalidArgumentError(
                    Text("TfscaleSumAt: a place is outside of a vector of ", size_, " numbers")));
  }

 private:
  int64_t size_;
};

REGISTER_KERNEL_BUILDER(Name("TfscaleLargest").Device(tensorflow::DEVICE_CPU), LargestOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleSumAt").Device(tensorflow::DEVICE_CPU), SumAtOp);

}  // namespace
}  // namespace tfscale
