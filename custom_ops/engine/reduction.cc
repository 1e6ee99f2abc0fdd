#include "custom_ops/engine/reduction.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "custom_ops/engine/numbers.h"

namespace tfscale {
namespace {

// Numbers that are summed and encoded at a time: they fit in a core's own cache.
constexpr int64_t kTile = 64 * wire::kBlock;

std::vector<Span> TilesOf(const Span& span) {
  std::vector<Span> tiles;
  for (int64_t at = 0; at < span.count; at += kTile) {
    tiles.push_back({span.first + at, std::min(kTile, span.count - at)});
  }
  return tiles;
}

uint64_t Mix(uint64_t seed, uint64_t rank) {
  uint64_t h = seed + 0x9e3779b97f4a7c15u * (rank + 1);
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  return h ^ (h >> 31);
}

}  // namespace

void Reduction::Begin(const PartMemory& part) const {
  if (!request_.codec->lossless()) return;
  for (int c = 0; c < request_.layout.chunks(); ++c) residuals_->AddInY(part.PieceOf(c));
}

// The bytes where they lie, or copied or encoded.
View Reduction::Outgoing(PartMemory* part, const Move& move) const {
  const wire::Codec& codec = *request_.codec;
  if (move.final || codec.lossless()) {
    const View view = part->InPlace(move);
    if (view.data != nullptr) return view;
  }
  View view = pool_->Get(part->MessageBytes(move));
  uint8_t* bytes = view.data;
  for (int c = move.first; c < move.last; ++c) {
    const int64_t count = part->PieceOf(c).count;
    if (codec.lossless()) {
      codec.Encode(part->Base(c), count, bytes, wire::Rounding());
    } else {
      EncodePiece(part, c, bytes, /*final=*/false);
    }
    bytes += codec.Bytes(count);
  }
  return view;
}

void Reduction::Add(PartMemory* part, int s) const {
  const Move& move = request_.program->moves[s];
  const wire::Codec& codec = *request_.codec;
  const View received = part->Take(s);
  const uint8_t* bytes = received.data;
  for (int c = move.first; c < move.last; ++c) {
    const int64_t count = part->PieceOf(c).count;
    if (codec.lossless()) {
      codec.DecodeAdd(bytes, count, part->Base(c), part->Y(c));
      part->NowInY(c);
    } else {
      part->addends(c).push_back({bytes, received.owner});
    }
    bytes += codec.Bytes(count);
  }
}

void Reduction::Finalise(PartMemory* part, const Move& move) const {
  const Goal goal = request_.program->goal;
  for (int c = move.first; c < move.last; ++c) {
    if (goal == Goal::kRoute) {
      Route(part, c);
      continue;
    }
    if (request_.codec->lossless()) {
      FinishInY(*part, c);
    } else if (goal == Goal::kMixture) {
      KeepMixture(part, c);
    } else if (goal == Goal::kReduceScatter) {
      KeepExact(part, c);
    } else {
      EncodePiece(part, c, part->Final(c), /*final=*/true);
    }
    part->NowInY(c);
    residuals_->NoteFinite(part->PieceOf(c));
  }
}

// What stays on this rank is not rounded; what leaves it is encoded once, or read where it lies.
void Reduction::Route(PartMemory* part, int c) const {
  const int64_t count = part->PieceOf(c).count;
  if (count == 0) return;
  if (request_.layout.is_in_y(c)) {
    std::memcpy(part->Y(c), part->Base(c), count * request_.codec->element_bytes());
  } else if (!request_.codec->lossless()) {
    EncodePiece(part, c, part->Final(c), /*final=*/true);
  }
}

void Reduction::FinishInY(const PartMemory& part, int c) const {
  const int64_t count = part.PieceOf(c).count;
  const uint8_t* base = part.Base(c);
  uint8_t* y = part.Y(c);
  if (Divisor() > 1 && request_.element == wire::Element::kFloat64) {
    Divide(reinterpret_cast<const double*>(base), count, static_cast<double>(Divisor()),
           reinterpret_cast<double*>(y));
  } else if (Divisor() > 1) {
    Divide(reinterpret_cast<const float*>(base), count, static_cast<float>(Divisor()),
           reinterpret_cast<float*>(y));
  } else if (base != y) {
    std::memcpy(y, base, count * request_.codec->element_bytes());
  }
}

// Nobody else needs this sum, so it is not rounded to the wire, and nothing is lost.
void Reduction::KeepExact(PartMemory* part, int c) const {
  const View scratch = pool_->Get(kTile * sizeof(float));
  for (const Span& tile : TilesOf(part->PieceOf(c))) {
    const float* sum = Sum(part, c, tile, reinterpret_cast<float*>(scratch.data), Divisor());
    std::copy_n(sum, tile.count, Result(tile));
    residuals_->KeepNoLoss(tile);
  }
  part->addends(c).clear();
}

// What rounding takes from each that this rank has sent to stays here: so nothing is lost, and
// ranks that hold the same end with the same.
void Reduction::KeepMixture(PartMemory* part, int c) const {
  const wire::Codec& codec = *request_.codec;
  const std::vector<Move>& moves = request_.program->moves;
  const auto sent = std::count_if(moves.begin(), moves.end(),
                                  [](const Move& move) { return move.kind == Kind::kSend; });
  const View scratch = pool_->Get(kTile * sizeof(float));
  const View bytes = pool_->Get(codec.Bytes(kTile));
  float* loss = reinterpret_cast<float*>(scratch.data);
  for (const Span& tile : TilesOf(part->PieceOf(c))) {
    const float* own = reinterpret_cast<const float*>(request_.x) + tile.first;
    const float* sum = Sum(part, c, tile, loss, /*divisor=*/1);
    std::copy_n(sum, tile.count, Result(tile));
    codec.Encode(own, tile.count, bytes.data, RoundingAt(tile.first));
    codec.DecodeSubtract(bytes.data, tile.count, own, loss);
    Scale(loss, tile.count, static_cast<float>(sent));
    tfscale::Add(Result(tile), loss, tile.count, Result(tile));
  }
  part->addends(c).clear();
}

// Sums and encodes tile by tile: a tile stays in the cache from the first addend
// to the last byte, and y is written once, with what the final bytes decode to.
void Reduction::EncodePiece(PartMemory* part, int c, uint8_t* bytes, bool final) const {
  const wire::Codec& codec = *request_.codec;
  const int divisor = final ? Divisor() : 1;
  const bool routes = request_.program->goal == Goal::kRoute;  // what leaves has no place in y
  const View scratch = pool_->Get(kTile * sizeof(float));
  for (const Span& tile : TilesOf(part->PieceOf(c))) {
    const float* sum = Sum(part, c, tile, reinterpret_cast<float*>(scratch.data), divisor);
    codec.Encode(sum, tile.count, bytes, RoundingAt(tile.first));
    residuals_->KeepLoss(bytes, sum, tile, static_cast<float>(divisor));
    if (final && !routes) codec.Decode(bytes, tile.count, Result(tile));
    bytes += codec.Bytes(tile.count);
  }
  part->addends(c).clear();
}

// This rank's numbers, its residual and all that it received, over `divisor`:
// in x itself if that is all, else in `scratch`.
const float* Reduction::Sum(PartMemory* part, int c, const Span& tile, float* scratch,
                            int divisor) const {
  const wire::Codec& codec = *request_.codec;
  const float* sum = residuals_->Contribution(tile, scratch);
  const int64_t offset = codec.Bytes(tile.first - part->PieceOf(c).first);
  for (const PartMemory::Addend& addend : part->addends(c)) {
    codec.DecodeAdd(addend.bytes + offset, tile.count, sum, scratch);
    sum = scratch;
  }
  if (divisor > 1) {
    Divide(sum, tile.count, static_cast<float>(divisor), scratch);
    sum = scratch;
  }
  return sum;
}

void Reduction::Keep(PartMemory* part, int s) const {
  const Move& move = request_.program->moves[s];
  const wire::Codec& codec = *request_.codec;
  const View received = part->Take(s);
  const bool in_place = received.data == nullptr;
  const bool decoded = in_place && codec.lossless();
  const uint8_t* bytes = in_place && !decoded ? part->Final(move.first) : received.data;
  for (int c = move.first; c < move.last; ++c) {
    const Span piece = part->PieceOf(c);
    if (!decoded) {
      codec.Decode(bytes, piece.count, part->Y(c));
      bytes += codec.Bytes(piece.count);
    }
    part->NowInY(c);
    residuals_->NoteFinite(piece);
  }
}

float* Reduction::Result(const Span& tile) const {
  return reinterpret_cast<float*>(request_.y) + tile.first;
}

wire::Rounding Reduction::RoundingAt(int64_t first) const {
  wire::Rounding rounding = request_.rounding;
  rounding.seed = Mix(rounding.seed, request_.program->rank);
  rounding.first = first;
  return rounding;
}

}  // namespace tfscale
