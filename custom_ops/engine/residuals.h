// Error feedback: what rounding lost is added to the next contribution.
#ifndef TFSCALE_ENGINE_RESIDUALS_H_
#define TFSCALE_ENGINE_RESIDUALS_H_

#include <atomic>
#include <cstdint>

#include "custom_ops/engine/request.h"

namespace tfscale {

// The residuals of one collective; if it has none, all these do nothing.
class Residuals {
 public:
  explicit Residuals(const Request& request) : request_(request) {}

  // y = x + residual, for a lossless wire, which adds in y.
  void AddInY(const Span& span) const;

  // x + residual, in `scratch`; x itself if there is no residual.
  const float* Contribution(const Span& span, float* scratch) const;

  // The one rule of error feedback: whoever encodes keeps what encoding lost.
  void KeepLoss(const uint8_t* bytes, const float* before, const Span& span, float times) const;
  void KeepNoLoss(const Span& span) const;

  // Looks at a piece of the result.
  void NoteFinite(const Span& span);

  // Called once, when the whole result is there.
  void Settle() const;

 private:
  void ForgetInfinite() const;

  const Request& request_;
  std::atomic<bool> finite_{true};
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_RESIDUALS_H_
