// LAMB's and LARS's update of one variable as TensorFlow ops.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "custom_ops/engine/text.h"
#include "custom_ops/kernels/inputs.h"
#include "custom_ops/kernels/workers.h"
#include "custom_ops/optimizers/update.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfscale {
namespace {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;
using VarPtr = tensorflow::core::RefCountPtr<Var>;

// For TensorFlow's choice of how many threads a variable is worth.
constexpr int64_t kCyclesPerBlock = 2 * optimizers::kBlock;

template <typename Numbers>
constexpr int64_t kNumbers = sizeof(Numbers) / sizeof(float);

// ---------------------------------------------------------------------------
// Ops

// Inputs are variables, the gradient and the rule's numbers.
template <typename Numbers>
absl::Status OneShape(InferenceContext* c) {
  const int variables = c->num_inputs() - 2;
  TF_RETURN_IF_ERROR(AreScalars(c, 0, variables));
  ShapeHandle shape = c->input(variables);
  for (int i = 0; i < variables; ++i) {
    const auto* handle = c->input_handle_shapes_and_types(i);
    if (handle == nullptr || handle->empty()) continue;
    TF_RETURN_IF_ERROR(c->Merge(shape, handle->front().shape, &shape));
  }
  ShapeHandle hyper;
  return c->Merge(c->input(variables + 1), c->Vector(kNumbers<Numbers>), &hyper);
}

REGISTER_OP("TfscaleLamb")
    .Input("var: resource")
    .Input("m: resource")
    .Input("v: resource")
    .Input("grad: T")
    .Input("hyper: float")
    .Attr("T: {float, bfloat16, half}")
    .Attr("adapt: bool = true")
    .SetIsStateful()
    .SetShapeFn(OneShape<optimizers::LambNumbers>)
    .Doc(R"doc(
One step of LAMB for one variable, whose state is float32.

hyper: the members of LambNumbers in custom_ops/optimizers/rules.h.
adapt: whether the step is scaled by the trust ratio.
)doc");

REGISTER_OP("TfscaleLars")
    .Input("var: resource")
    .Input("momentum: resource")
    .Input("grad: T")
    .Input("hyper: float")
    .Attr("T: {float, bfloat16, half}")
    .Attr("adapt: bool = true")
    .Attr("nesterov: bool = false")
    .Attr("rate_inside: bool = true")
    .Attr("clip: bool = false")
    .SetIsStateful()
    .SetShapeFn(OneShape<optimizers::LarsNumbers>)
    .Doc(R"doc(
One step of LARS for one variable, whose state is float32.

hyper: the members of LarsNumbers in custom_ops/optimizers/rules.h.
adapt: whether the step is scaled by the trust ratio.
rate_inside: whether the learning rate is inside the momentum, as in the paper.
clip: whether the trust ratio is at most the learning rate.
)doc");

// ---------------------------------------------------------------------------
// Variables

optimizers::Type TypeOf(DataType type) {
  if (type == tensorflow::DT_BFLOAT16) return optimizers::Type::kBfloat16;
  if (type == tensorflow::DT_HALF) return optimizers::Type::kFloat16;
  return optimizers::Type::kFloat32;
}

void* Data(const Tensor& tensor) { return const_cast<char*>(tensor.tensor_data().data()); }

std::string Describe(DataType type, const tensorflow::TensorShape& shape) {
  return Text(DataTypeString(type), shape.DebugString());
}

// The variables that an op updates: the trained one first, then its state.
// Locked, since others may read them meanwhile, and in the order of their
// addresses, so that two ops never wait for each other.
template <int kCount>
class Variables {
 public:
  using Roles = std::array<const char*, kCount>;

  Variables(OpKernelContext* ctx, const Roles& roles) : ctx_(ctx), roles_(roles) {}

  absl::Status Lock() {
    std::array<tensorflow::mutex*, kCount> mutexes;
    for (int i = 0; i < kCount; ++i) {
      TF_RETURN_IF_ERROR(Find(i));
      mutexes[i] = found_[i]->mu();
    }
    std::sort(mutexes.begin(), mutexes.end());
    if (std::adjacent_find(mutexes.begin(), mutexes.end()) != mutexes.end()) {
      return absl::InvalidArgumentError(
          Text(ctx_->op_kernel().type_string(), ": the same variable was given twice; ", Name(0),
               " and its state must be ", kCount, " different variables"));
    }
    for (auto* mutex : mutexes) locks_.emplace_back(*mutex);
    return absl::OkStatus();
  }

  // All have the gradient's shape, the trained one its type, and state is float32.
  absl::Status Check(const Tensor& gradient) {
    for (int i = 0; i < kCount; ++i) {
      const Tensor& tensor = *found_[i]->tensor();
      if (!found_[i]->is_initialized) return Uninitialised(i);
      const DataType type = i == 0 ? gradient.dtype() : tensorflow::DT_FLOAT;
      if (tensor.dtype() == type && tensor.shape() == gradient.shape()) continue;
      return absl::InvalidArgumentError(Text(
          ctx_->op_kernel().type_string(), ": ", Name(i), " is ",
          Describe(tensor.dtype(), tensor.shape()), ", expected ", Describe(type, gradient.shape()),
          ", because the gradient is ", Describe(gradient.dtype(), gradient.shape()),
          "; gradient and variable have one shape and type, and state is float32"));
    }
    return absl::OkStatus();
  }

  // Makes copies of buffers that readers still hold: they keep the old numbers.
  absl::Status Own() {
    for (const VarPtr& variable : found_) {
      Tensor* tensor = variable->tensor();
      if (tensor->RefCountIsOne() || tensor->NumElements() == 0) continue;
      Tensor copy;
      TF_RETURN_IF_ERROR(ctx_->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
      std::memcpy(Data(copy), Data(*tensor), tensor->tensor_data().size());
      *tensor = copy;
    }
    return absl::OkStatus();
  }

  void* data(int i) const { return Data(*found_[i]->tensor()); }

 private:
  absl::Status Find(int i) {
    const absl::Status status = FindResource(ctx_, i, roles_[i], &found_[i]);
    return absl::IsNotFound(status) ? Uninitialised(i) : status;
  }

  std::string Name(int i) const {
    return Text(roles_[i], " ('", HandleFromInput(ctx_, i).name(), "')");
  }

  absl::Status Uninitialised(int i) const {
    return absl::FailedPreconditionError(
        Text(ctx_->op_kernel().type_string(), ": ", Name(i),
             " has no value yet; initialise or restore it before the first update"));
  }

  OpKernelContext* const ctx_;
  const Roles roles_;
  std::array<VarPtr, kCount> found_;  // outlive the locks
  std::vector<std::unique_lock<tensorflow::mutex>> locks_;
};

// ---------------------------------------------------------------------------
// Kernels

template <typename Numbers>
absl::Status ReadNumbers(const Tensor& hyper, Numbers* numbers) {
  static_assert(std::is_trivially_copyable<Numbers>::value, "read as they are");
  if (hyper.dims() != 1 || hyper.NumElements() != kNumbers<Numbers>) {
    return absl::InvalidArgumentError(Text("hyper has shape ", hyper.shape().DebugString(),
                                           ", expected [", kNumbers<Numbers>,
                                           "]; make it with tfscale.ops.optimizers"));
  }
  std::memcpy(numbers, Data(hyper), sizeof(*numbers));
  return absl::OkStatus();
}

class LambOp : public tensorflow::OpKernel {
 public:
  explicit LambOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("adapt", &adapt_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& gradient = ctx->input(3);
    optimizers::LambNumbers rule;
    OP_REQUIRES_OK(ctx, ReadNumbers(ctx->input(4), &rule));
    Variables<3> variables(ctx, {"var", "m", "v"});
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, variables.Check(gradient));
    OP_REQUIRES_OK(ctx, variables.Own());
    optimizers::Lamb(rule, adapt_, TypeOf(gradient.dtype()),
                     {variables.data(0), Data(gradient), static_cast<float*>(variables.data(1)),
                      static_cast<float*>(variables.data(2)), gradient.NumElements()},
                     OnWorkers(ctx, kCyclesPerBlock));
  }

 private:
  bool adapt_;
};

class LarsOp : public tensorflow::OpKernel {
 public:
  explicit LarsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("adapt", &switches_.adapt));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nesterov", &switches_.nesterov));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rate_inside", &switches_.rate_inside));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("clip", &switches_.clip));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& gradient = ctx->input(2);
    optimizers::LarsNumbers rule;
    OP_REQUIRES_OK(ctx, ReadNumbers(ctx->input(3), &rule));
    Variables<2> variables(ctx, {"var", "momentum"});
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, variables.Check(gradient));
    OP_REQUIRES_OK(ctx, variables.Own());
    optimizers::Lars(rule, switches_, TypeOf(gradient.dtype()),
                     {variables.data(0), Data(gradient), static_cast<float*>(variables.data(1)),
                      nullptr, gradient.NumElements()},
                     OnWorkers(ctx, kCyclesPerBlock));
  }

 private:
  optimizers::LarsSwitches switches_;
};

#define TFSCALE_OPTIMIZER(NAME, OP, T) \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), OP)

TFSCALE_OPTIMIZER("TfscaleLamb", LambOp, float);
TFSCALE_OPTIMIZER("TfscaleLamb", LambOp, Eigen::half);
TFSCALE_OPTIMIZER("TfscaleLamb", LambOp, Eigen::bfloat16);
TFSCALE_OPTIMIZER("TfscaleLars", LarsOp, float);
TFSCALE_OPTIMIZER("TfscaleLars", LarsOp, Eigen::half);
TFSCALE_OPTIMIZER("TfscaleLars", LarsOp, Eigen::bfloat16);

#undef TFSCALE_OPTIMIZER

}  // namespace
}  // namespace tfscale
