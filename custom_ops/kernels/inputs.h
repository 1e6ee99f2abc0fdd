// Inputs of ops as single values, and shapes that are made of them. Tensor::scalar() and
// HandleFromInput() end the process, or read beyond a buffer, where a tensor has another shape,
// and TensorShape's constructor ends it where a tensor would be too large.
#ifndef TFSCALE_KERNELS_INPUTS_H_
#define TFSCALE_KERNELS_INPUTS_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "custom_ops/engine/text.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfscale {

// What input `index` holds, if it is one value; `name` is for the message.
template <typename T>
absl::Status ReadOne(tensorflow::OpKernelContext* ctx, int index, const char* name, T* value) {
  const tensorflow::Tensor& tensor = ctx->input(index);
  if (!tensorflow::TensorShapeUtils::IsScalar(tensor.shape())) {
    return absl::InvalidArgumentError(Text(ctx->op_kernel().type_string(), ": ", name,
                                           " must be one value (a scalar), got a tensor ",
                                           "of shape ", tensor.shape().DebugString()));
  }
  *value = tensor.scalar<T>()();
  return absl::OkStatus();
}

// The resource that input `index` is the handle of; the caller holds a reference.
template <typename Resource>
absl::Status FindResource(tensorflow::OpKernelContext* ctx, int index, const char* name,
                          tensorflow::core::RefCountPtr<Resource>* found) {
  tensorflow::ResourceHandle handle;
  TF_RETURN_IF_ERROR(ReadOne(ctx, index, name, &handle));
  return LookupResource(ctx, handle, found);
}

// A shape of these sizes, if a tensor can have it.
inline absl::Status MakeShape(tensorflow::OpKernelContext* ctx,
                              std::initializer_list<int64_t> sizes,
                              tensorflow::TensorShape* shape) {
  const absl::Status made = tensorflow::TensorShape::BuildTensorShape(sizes, shape);
  if (made.ok()) return made;
  std::string text;
  for (const int64_t size : sizes) text += Text(text.empty() ? "" : ",", size);
  return absl::InvalidArgumentError(Text(ctx->op_kernel().type_string(),
                                         ": the inputs ask for a tensor of shape [", text,
                                         "], which no tensor can have; pass smaller ones"));
}

// For shape functions: these inputs are scalars.
inline absl::Status AreScalars(tensorflow::shape_inference::InferenceContext* c, int first,
                               int end) {
  tensorflow::shape_inference::ShapeHandle scalar;
  for (int i = first; i < end; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &scalar));
  return absl::OkStatus();
}

}  // namespace tfscale

#endif  // TFSCALE_KERNELS_INPUTS_H_
