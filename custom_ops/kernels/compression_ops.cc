// The passes of compression methods over a gradient and what is kept of it, as TensorFlow ops.
//
// The first input is the variable with what was not sent yet. TfscaleLargest may have none, and
// only reads: it is not stateful, for TensorFlow runs stateful ops without a resource in the order
// of the trace, one replica's after the other's, and replicas wait for each other in between.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/compression/low_rank.h"
#include "custom_ops/compression/select.h"
#include "custom_ops/engine/text.h"
#include "custom_ops/kernels/inputs.h"
#include "custom_ops/kernels/workers.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfscale {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr int64_t kCyclesPerPart = 1 << 16;

REGISTER_OP("TfscaleLargest")
    .Input("residual: feedback * resource")
    .Input("x: float")
    .Attr("feedback: int >= 0")
    .Attr("count: int >= 0")
    .Output("places: int32")
    .Output("numbers: float")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      int64_t count;
      TF_RETURN_IF_ERROR(AreScalars(c, 0, c->num_inputs() - 1));
      TF_RETURN_IF_ERROR(c->GetAttr("count", &count));
      c->set_output(0, c->Vector(count));
      c->set_output(1, c->Vector(count));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The places of the largest magnitudes of x plus the residual, ascending, and the numbers there.
)doc");

REGISTER_OP("TfscaleSumAt")
    .Input("residual: resource")
    .Input("x: float")
    .Input("places: int32")
    .Input("kept: float")
    .Input("every_place: int32")
    .Input("every_number: float")
    .Input("finite: bool")
    .Output("sum: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      c->set_output(0, c->input(1));
      TF_RETURN_IF_ERROR(AreScalars(c, 0, 1));
      return AreScalars(c, 6, 7);
    })
    .Doc(R"doc(
Zeros of x's shape, to which numbers are added at places, one after the other.

If the sums are finite, the residual becomes x plus the residual, but for `places`, which get
`kept`.
)doc");

REGISTER_OP("TfscaleLowRankRows")
    .Input("residual: resource")
    .Input("x: float")
    .Input("factor: float")
    .Output("product: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle matrix, factor;
      TF_RETURN_IF_ERROR(AreScalars(c, 0, 1));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &matrix));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &factor));
      c->set_output(0, c->Matrix(c->Dim(matrix, 0), c->Dim(factor, 0)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
(x + residual) factor^T, of a matrix and a factor with a row for each of its columns.
)doc");

REGISTER_OP("TfscaleLowRankColumns")
    .Input("residual: resource")
    .Input("x: float")
    .Input("basis: float")
    .Output("own: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle matrix, basis;
      TF_RETURN_IF_ERROR(AreScalars(c, 0, 1));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &matrix));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &basis));
      c->set_output(0, c->Matrix(c->Dim(basis, 1), c->Dim(matrix, 1)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
basis^T (x + residual)
)doc");

REGISTER_OP("TfscaleLowRankSum")
    .Input("residual: resource")
    .Input("x: float")
    .Input("basis: float")
    .Input("own: float")
    .Input("total: float")
    .Input("finite: bool")
    .Output("sum: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      c->set_output(0, c->input(1));
      TF_RETURN_IF_ERROR(AreScalars(c, 0, 1));
      return AreScalars(c, 5, 6);
    })
    .Doc(R"doc(
basis total. If that is finite, the residual becomes x + residual - basis own.
)doc");

// What was not sent yet, if the op keeps it: locked, and of the gradient's size.
class Residual {
 public:
  absl::Status Open(OpKernelContext* ctx, const Tensor& x, bool writes) {
    TF_RETURN_IF_ERROR(FindResource(ctx, 0, "residual", &variable_));
    lock_ = std::make_unique<tensorflow::mutex_lock>(*variable_->mu());
    Tensor* tensor = variable_->tensor();
    if (!variable_->is_initialized || tensor->dtype() != tensorflow::DT_FLOAT ||
        tensor->NumElements() != x.NumElements()) {
      return absl::InvalidArgumentError(Text(ctx->op_kernel().type_string(), ": the residual has ",
                                             tensor->NumElements(), " numbers, expected ",
                                             x.NumElements(), " of float32, as the gradient has"));
    }
    if (writes && !tensor->RefCountIsOne()) {  // others read the old numbers
      Tensor copy;
      TF_RETURN_IF_ERROR(ctx->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
      const auto from = tensor->flat<float>();
      std::copy_n(from.data(), from.size(), copy.flat<float>().data());
      *tensor = copy;
    }
    numbers_ = tensor->flat<float>().data();
    return absl::OkStatus();
  }

  float* numbers() const { return numbers_; }  // nullptr: nothing is kept

 private:
  tensorflow::core::RefCountPtr<Var> variable_;
  std::unique_ptr<tensorflow::mutex_lock> lock_;
  float* numbers_ = nullptr;
};

absl::Status CheckMatrix(OpKernelContext* ctx, int i, int64_t rows, int64_t columns) {
  const TensorShape& found = ctx->input(i).shape();
  if (found.dims() == 2 && found.dim_size(0) == rows && found.dim_size(1) == columns) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(Text(ctx->op_kernel().type_string(), ": input ", i,
                                         " has shape ", found.DebugString(), ", expected [", rows,
                                         ",", columns, "]"));
}

class LargestOp : public tensorflow::OpKernel {
 public:
  explicit LargestOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("count", &count_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES(ctx, ctx->num_inputs() <= 2,
                absl::InvalidArgumentError(Text(
                    "TfscaleLargest: expected at most one residual, got ", ctx->num_inputs() - 1)));
    const Tensor& x = ctx->input(ctx->num_inputs() - 1);
    OP_REQUIRES(ctx, count_ <= x.NumElements() && x.NumElements() <= kMost,
                absl::InvalidArgumentError(Text("TfscaleLargest: ", count_, " of ", x.NumElements(),
                                                " numbers, which may be ", kMost, " at most")));
    Residual residual;
    if (ctx->num_inputs() > 1) OP_REQUIRES_OK(ctx, residual.Open(ctx, x, false));
    Tensor *places, *numbers;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({count_}), &places));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({count_}), &numbers));
    // Here as on the workers: a sum that is denormal must be zero for all, or for none.
    const tensorflow::port::ScopedFlushDenormal flush;
    compression::Largest(x.flat<float>().data(), residual.numbers(), x.NumElements(), count_,
                         places->flat<int32_t>().data(), numbers->flat<float>().data(),
                         OnWorkers(ctx, kCyclesPerPart));
  }

 private:
  static constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  int64_t count_;
};

class SumAtOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &x = ctx->input(1), &places = ctx->input(2), &kept = ctx->input(3);
    const Tensor &every_place = ctx->input(4), &every_number = ctx->input(5);
    OP_REQUIRES(ctx,
                places.NumElements() == kept.NumElements() &&
                    every_place.NumElements() == every_number.NumElements(),
                absl::InvalidArgumentError("TfscaleSumAt: not as many numbers as places"));
    bool finite;
    OP_REQUIRES_OK(ctx, ReadOne(ctx, 6, "finite", &finite));
    const int64_t size = x.NumElements();
    const auto own = places.flat<int32_t>(), every = every_place.flat<int32_t>();
    OP_REQUIRES(
        ctx,
        compression::AreWithin(own.data(), own.size(), size) &&
            compression::AreWithin(every.data(), every.size(), size),
        absl::InvalidArgumentError(Text("TfscaleSumAt: a place is outside of ", size, " numbers")));
    Residual residual;
    OP_REQUIRES_OK(ctx, residual.Open(ctx, x, finite));
    if (finite) {
      compression::Keep(x.flat<float>().data(), residual.numbers(), size, own.data(),
                        kept.flat<float>().data(), own.size(), OnWorkers(ctx, kCyclesPerPart));
    }
    Tensor* sum;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({1}, 0, x.shape(), &sum));
    float* sums = sum->flat<float>().data();
    std::fill_n(sums, size, 0.0f);
    compression::Add(every_number.flat<float>().data(), every.data(), every.size(), sums);
  }
};

// Ops of PowerSGD.
class LowRankOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

 protected:
  absl::Status ReadMatrix(OpKernelContext* ctx, bool writes, int64_t rank, Residual* residual,
                          compression::Matrix* m) const {
    const Tensor& x = ctx->input(1);
    if (x.dims() != 2) {
      return absl::InvalidArgumentError(
          Text(type_string(), ": expected a matrix, got ", x.shape().DebugString()));
    }
    TF_RETURN_IF_ERROR(residual->Open(ctx, x, writes));
    *m = {x.flat<float>().data(), residual->numbers(), x.dim_size(0), x.dim_size(1), rank};
    return absl::OkStatus();
  }

  static int64_t Size(const Tensor& tensor, int dim) {
    return tensor.dims() == 2 ? tensor.dim_size(dim) : -1;
  }
};

class LowRankRowsOp : public LowRankOp {
 public:
  using LowRankOp::LowRankOp;

  void Compute(OpKernelContext* ctx) override {
    Residual residual;
    compression::Matrix m;
    const int64_t rank = Size(ctx->input(2), 0);
    OP_REQUIRES_OK(ctx, ReadMatrix(ctx, false, rank, &residual, &m));
    OP_REQUIRES_OK(ctx, CheckMatrix(ctx, 2, std::max<int64_t>(rank, 0), m.columns));
    TensorShape shape;
    OP_REQUIRES_OK(ctx, MakeShape(ctx, {m.rows, rank}, &shape));
    Tensor* product;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &product));
    if (product->NumElements() == 0) return;  // of perhaps 2^40 rows
    compression::Project(m, ctx->input(2).flat<float>().data(), product->flat<float>().data(),
                         OnWorkers(ctx, kCyclesPerPart));
  }
};

class LowRankColumnsOp : public LowRankOp {
 public:
  using LowRankOp::LowRankOp;

  void Compute(OpKernelContext* ctx) override {
    Residual residual;
    compression::Matrix m;
    const int64_t rank = Size(ctx->input(2), 1);
    OP_REQUIRES_OK(ctx, ReadMatrix(ctx, false, rank, &residual, &m));
    OP_REQUIRES_OK(ctx, CheckMatrix(ctx, 2, m.rows, std::max<int64_t>(rank, 0)));
    TensorShape shape, scratch;
    OP_REQUIRES_OK(ctx, MakeShape(ctx, {rank, m.columns}, &shape));
    OP_REQUIRES_OK(ctx, MakeShape(ctx, {compression::Sums(m), rank, m.columns}, &scratch));
    Tensor* own;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &own));
    if (own->NumElements() == 0) return;
    Tensor sums;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_FLOAT, scratch, &sums));
    compression::ProjectBack(m, ctx->input(2).flat<float>().data(), sums.flat<float>().data(),
                             own->flat<float>().data(), OnWorkers(ctx, kCyclesPerPart));
  }
};

class LowRankSumOp : public LowRankOp {
 public:
  using LowRankOp::LowRankOp;

  void Compute(OpKernelContext* ctx) override {
    bool finite;
    OP_REQUIRES_OK(ctx, ReadOne(ctx, 5, "finite", &finite));
    Residual residual;
    compression::Matrix m;
    const int64_t rank = Size(ctx->input(2), 1);
    OP_REQUIRES_OK(ctx, ReadMatrix(ctx, finite, rank, &residual, &m));
    OP_REQUIRES(ctx, rank > 0, absl::InvalidArgumentError("TfscaleLowRankSum: no basis"));
    OP_REQUIRES_OK(ctx, CheckMatrix(ctx, 2, m.rows, rank));
    OP_REQUIRES_OK(ctx, CheckMatrix(ctx, 3, rank, m.columns));
    OP_REQUIRES_OK(ctx, CheckMatrix(ctx, 4, rank, m.columns));
    Tensor* sum;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({1}, 0, ctx->input(1).shape(), &sum));
    if (sum->NumElements() == 0) return;
    const float* own = finite ? ctx->input(3).flat<float>().data() : nullptr;
    compression::Finish(m, ctx->input(2).flat<float>().data(), own,
                        ctx->input(4).flat<float>().data(), sum->flat<float>().data(),
                        OnWorkers(ctx, kCyclesPerPart));
  }
};

#define TFSCALE_COMPRESSION(NAME, OP) \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(tensorflow::DEVICE_CPU), OP)

TFSCALE_COMPRESSION("TfscaleLargest", LargestOp);
TFSCALE_COMPRESSION("TfscaleSumAt", SumAtOp);
TFSCALE_COMPRESSION("TfscaleLowRankRows", LowRankRowsOp);
TFSCALE_COMPRESSION("TfscaleLowRankColumns", LowRankColumnsOp);
TFSCALE_COMPRESSION("TfscaleLowRankSum", LowRankSumOp);

#undef TFSCALE_COMPRESSION

}  // namespace
}  // namespace tfscale
