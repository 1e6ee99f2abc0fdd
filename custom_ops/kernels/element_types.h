// From the type of a tensor to the type in which its numbers are summed, and back.
#ifndef TFSCALE_KERNELS_ELEMENT_TYPES_H_
#define TFSCALE_KERNELS_ELEMENT_TYPES_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "custom_ops/wire/codec.h"
#include "tensorflow/core/framework/numeric_types.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfscale {

using tensorflow::DataType;
using tensorflow::Tensor;

// Halves are summed as float32, and low-precision wires carry float32.
inline DataType SummedAs(DataType type, bool lossless) {
  if (type == tensorflow::DT_HALF || type == tensorflow::DT_BFLOAT16) return tensorflow::DT_FLOAT;
  if (type == tensorflow::DT_DOUBLE && !lossless) return tensorflow::DT_FLOAT;
  return type;
}

inline wire::Element ElementOf(DataType type) {
  switch (type) {
    case tensorflow::DT_DOUBLE:
      return wire::Element::kFloat64;
    case tensorflow::DT_INT32:
      return wire::Element::kInt32;
    case tensorflow::DT_INT64:
      return wire::Element::kInt64;
    default:
      return wire::Element::kFloat32;
  }
}

inline uint8_t* Bytes(const Tensor& tensor) {
  return reinterpret_cast<uint8_t*>(const_cast<char*>(tensor.tensor_data().data()));
}

template <typename From>
void Widen(const Tensor& x, uint8_t* y) {
  const From* from = reinterpret_cast<const From*>(Bytes(x));
  float* to = reinterpret_cast<float*>(y);
  for (int64_t i = 0; i < x.NumElements(); ++i) to[i] = static_cast<float>(from[i]);
}

// Copies x to where it is summed, as float32 if its own type is not the sum's.
inline void Bring(const Tensor& x, DataType summed_as, uint8_t* y) {
  if (x.dtype() == summed_as) {
    std::memcpy(y, Bytes(x), x.tensor_data().size());
  } else if (x.dtype() == tensorflow::DT_HALF) {
    Widen<Eigen::half>(x, y);
  } else if (x.dtype() == tensorflow::DT_BFLOAT16) {
    Widen<Eigen::bfloat16>(x, y);
  } else {
    Widen<double>(x, y);
  }
}

inline void Narrow(const uint8_t* floats, Tensor* y) {
  const float* x = reinterpret_cast<const float*>(floats);
  const int64_t n = y->NumElements();
  auto cast = [&](auto* to) {
    using To = std::remove_reference_t<decltype(*to)>;
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(x[i]);
  };
  if (y->dtype() == tensorflow::DT_HALF) return cast(reinterpret_cast<Eigen::half*>(Bytes(*y)));
  if (y->dtype() == tensorflow::DT_BFLOAT16) {
    return cast(reinterpret_cast<Eigen::bfloat16*>(Bytes(*y)));
  }
  cast(reinterpret_cast<double*>(Bytes(*y)));
}

}  // namespace tfscale

#endif  // TFSCALE_KERNELS_ELEMENT_TYPES_H_
