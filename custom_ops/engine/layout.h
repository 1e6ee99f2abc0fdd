// Which numbers of a buffer belong to which piece (one chunk of one part).
#ifndef TFSCALE_ENGINE_LAYOUT_H_
#define TFSCALE_ENGINE_LAYOUT_H_

#include <algorithm>
#include <cstdint>

namespace tfscale {

struct Span {
  int64_t first;
  int64_t count;
};

// Two ways to cut a buffer. Joined: part after part, each cut into chunks, so
// neighbouring chunks of a part are neighbours in memory. Sharded: chunk after
// chunk (rank r owns the r-th shard), each cut into parts.
class Layout {
 public:
  // Cuts `count` numbers so that a piece has about `piece` numbers, a multiple
  // of `unit`; the last pieces may be short or empty.
  static Layout Joined(int64_t count, int chunks, int64_t piece, int64_t unit) {
    const int64_t parts = Parts(count, chunks * piece);
    piece = RoundUp(CeilDiv(count, parts * chunks), unit);
    return Layout(count, count, chunks, piece, Parts(count, chunks * piece));
  }
  static Layout Sharded(int64_t shard, int chunks, int64_t piece, int64_t unit) {
    const int64_t parts = Parts(shard, piece);
    piece = RoundUp(CeilDiv(shard, parts), unit);
    return Layout(shard * chunks, shard, chunks, piece, Parts(shard, piece));
  }

  Span piece(int64_t part, int chunk) const {
    if (sharded_) {
      const int64_t begin = std::min(part * piece_, shard_), end = std::min(begin + piece_, shard_);
      return {chunk * shard_ + begin, end - begin};
    }
    const int64_t begin = std::min((part * chunks_ + chunk) * piece_, count_);
    return {begin, std::min(begin + piece_, count_) - begin};
  }

  int64_t count() const { return count_; }
  int64_t parts() const { return parts_; }
  int64_t piece_size() const { return piece_; }
  int chunks() const { return chunks_; }

 private:
  Layout(int64_t count, int64_t shard, int chunks, int64_t piece, int64_t parts)
      : count_(count),
        shard_(shard),
        piece_(piece),
        parts_(parts),
        chunks_(chunks),
        sharded_(shard != count) {}

  static int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static int64_t RoundUp(int64_t a, int64_t unit) {
    return std::max(unit, CeilDiv(a, unit) * unit);
  }
  static int64_t Parts(int64_t count, int64_t size) {
    return std::max<int64_t>(1, CeilDiv(count, std::max<int64_t>(1, size)));
  }

  int64_t count_, shard_, piece_, parts_;
  int chunks_;
  bool sharded_;
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_LAYOUT_H_
