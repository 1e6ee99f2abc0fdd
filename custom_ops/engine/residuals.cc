#include "custom_ops/engine/residuals.h"

#include <algorithm>
#include <cstring>

#include "custom_ops/engine/numbers.h"

namespace tfscale {
namespace {

template <typename T>
void AddAs(const Request& request, const Span& span) {
  const T* x = reinterpret_cast<const T*>(request.x) + span.first;
  T* y = reinterpret_cast<T*>(request.y) + span.first;
  Add(x, request.residual + span.first, span.count, y);
}

template <typename T>
bool AllFiniteAs(const Request& request, const Span& span) {
  return AllFinite(reinterpret_cast<const T*>(request.y) + span.first, span.count);
}

}  // namespace

void Residuals::AddInY(const Span& span) const {
  if (request_.residual == nullptr) return;
  const bool wide = request_.element == wire::Element::kFloat64;
  wide ? AddAs<double>(request_, span) : AddAs<float>(request_, span);
}

const float* Residuals::Contribution(const Span& span, float* scratch) const {
  const float* x = reinterpret_cast<const float*>(request_.x) + span.first;
  if (request_.residual == nullptr) return x;
  Add(x, request_.residual + span.first, span.count, scratch);
  return scratch;
}

void Residuals::KeepLoss(const uint8_t* bytes, const float* before, const Span& span,
                         float times) const {
  if (request_.new_residual == nullptr) return;
  float* loss = request_.new_residual + span.first;
  request_.codec->DecodeSubtract(bytes, span.count, before, loss);
  if (times != 1.0f) Scale(loss, span.count, times);
}

void Residuals::KeepNoLoss(const Span& span) const {
  if (request_.new_residual == nullptr) return;
  std::fill_n(request_.new_residual + span.first, span.count, 0.0f);
}

void Residuals::NoteFinite(const Span& span) {
  if (request_.new_residual == nullptr) return;
  const bool wide = request_.element == wire::Element::kFloat64;
  if (!(wide ? AllFiniteAs<double>(request_, span) : AllFiniteAs<float>(request_, span))) {
    finite_ = false;
  }
}

void Residuals::Settle() const {
  if (request_.new_residual == nullptr) return;
  const size_t bytes = request_.layout.count() * sizeof(float);
  const bool scatter = request_.program->goal == Goal::kReduceScatter;
  if (!finite_ && !scatter) {
    std::memcpy(request_.new_residual, request_.residual, bytes);
  } else if (request_.codec->lossless()) {
    std::memset(request_.new_residual, 0, bytes);
  } else if (scatter) {
    ForgetInfinite();
  }
}

// A rank of a reduce-scatter does not see whether the whole sum is finite; it
// keeps the old residual where its own loss is not.
void Residuals::ForgetInfinite() const {
  for (int64_t i = 0; i < request_.layout.count(); ++i) {
    if (!AllFinite(request_.new_residual + i, 1)) {
      request_.new_residual[i] = request_.residual[i];
    }
  }
}

}  // namespace tfscale
