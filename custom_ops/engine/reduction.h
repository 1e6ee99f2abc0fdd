// What the moves of a program do to the numbers of a part: they are summed,
// encoded and decoded.
#ifndef TFSCALE_ENGINE_REDUCTION_H_
#define TFSCALE_ENGINE_REDUCTION_H_

#include <cstdint>

#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/engine/part_memory.h"
#include "custom_ops/engine/request.h"
#include "custom_ops/engine/residuals.h"

namespace tfscale {

// A lossless wire adds each message in y as it comes. Sums that are to be encoded
// are not made before then: see EncodePiece.
class Reduction {
 public:
  Reduction(const Request& request, Residuals* residuals, BufferPool* pool)
      : request_(request), residuals_(residuals), pool_(pool) {}

  // Before the first move of a part.
  void Begin(const PartMemory& part) const;

  // The message of a move that sends.
  View Outgoing(PartMemory* part, const Move& move) const;

  void Add(PartMemory* part, int move) const;
  void Finalise(PartMemory* part, const Move& move) const;
  void Keep(PartMemory* part, int move) const;

 private:
  void FinishInY(const PartMemory& part, int chunk) const;
  void Route(PartMemory* part, int chunk) const;
  void KeepExact(PartMemory* part, int chunk) const;
  void KeepMixture(PartMemory* part, int chunk) const;
  void EncodePiece(PartMemory* part, int chunk, uint8_t* bytes, bool final) const;
  const float* Sum(PartMemory* part, int chunk, const Span& tile, float* scratch,
                   int divisor) const;
  int Divisor() const { return request_.mean ? request_.program->ranks : 1; }
  float* Result(const Span& tile) const;
  wire::Rounding RoundingAt(int64_t first) const;

  const Request& request_;
  Residuals* const residuals_;
  BufferPool* const pool_;
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_REDUCTION_H_
