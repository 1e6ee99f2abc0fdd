#include "custom_ops/engine/part_memory.h"

namespace tfscale {

PartMemory::PartMemory(const Request& request, int64_t part, BufferPool* pool)
    : request_(request),
      part_(part),
      pieces_(request.program->chunks),
      received_(request.program->moves.size()) {
  if (request_.codec->lossless()) return;
  int64_t bytes = 0;
  for (int c = 0; c < request_.program->chunks; ++c) {
    offsets_.push_back(bytes);
    bytes += request_.codec->Bytes(PieceOf(c).count);
  }
  final_bytes_ = pool->Get(bytes);
}

uint8_t* PartMemory::Y(int chunk) const {
  return request_.y + request_.layout.in_y(part_, chunk).first * request_.codec->element_bytes();
}

// A lossless wire adds the residual in y before all else: see Reduction::Begin.
const uint8_t* PartMemory::Base(int chunk) const {
  if (pieces_[chunk].in_y || request_.residual != nullptr) return Y(chunk);
  return request_.x + PieceOf(chunk).first * request_.codec->element_bytes();
}

int64_t PartMemory::MessageBytes(const Move& move) const {
  int64_t bytes = 0;
  for (int c = move.first; c < move.last; ++c) {
    bytes += request_.codec->Bytes(PieceOf(c).count);
  }
  return bytes;
}

// For a lossless wire the final bytes are the result itself, or in a route what this rank brings.
//
// A partial sum that lies in y may be sent from there as well: the owner's
// final bytes overwrite it only after every rank's part of the sum, this one
// included, has been taken.
View PartMemory::InPlace(const Move& move) const {
  const size_t bytes = MessageBytes(move);
  if (!request_.codec->lossless()) return {Final(move.first), bytes, final_bytes_.owner};
  auto place = [&](int c) { return move.kind == Kind::kSend ? Base(c) : Y(c); };
  const uint8_t* end = place(move.first);
  for (int c = move.first; c < move.last; ++c) {
    const Span piece = PieceOf(c);
    if (piece.count > 0 && place(c) != end) return View();
    end += piece.count * request_.codec->element_bytes();
  }
  return {const_cast<uint8_t*>(place(move.first)), bytes, request_.owner};
}

View PartMemory::PlaceFor(int s) const {
  const Move& move = request_.program->moves[s];
  View into;
  into.size = MessageBytes(move);
  if (into.size == 0 || move.kind != Kind::kKeep) return into;
  const View in_place = InPlace(move);
  return in_place.data == nullptr ? into : in_place;
}

}  // namespace tfscale
