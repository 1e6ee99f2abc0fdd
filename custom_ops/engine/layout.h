// Which numbers of a buffer belong to which piece (one chunk of one part).
#ifndef TFSCALE_ENGINE_LAYOUT_H_
#define TFSCALE_ENGINE_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace tfscale {

struct Span {
  int64_t first;
  int64_t count;
};

// Three ways to cut a buffer. Joined: part after part, each cut into chunks, so
// neighbouring chunks of a part are neighbours in memory. Sharded: chunk after
// chunk (rank r owns the r-th shard), each cut into parts. Routed: chunks of any sizes, each cut
// into parts, some of which lie in x, some in y, some in both, and most in neither.
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

  // The chunks `in_x` lie in x one after the other, and hold `brought` numbers each; likewise
  // `in_y` and `got`. A chunk in both has the same size in both. However large they are, pieces are
  // cut alike, and so ranks that do not know each other's sizes agree on them.
  static Layout Routed(int chunks, const std::vector<int>& in_x,
                       const std::vector<int64_t>& brought, const std::vector<int>& in_y,
                       const std::vector<int64_t>& got, int64_t piece, int64_t unit) {
    auto places = std::make_shared<std::vector<Place>>(chunks);
    int64_t largest = 0, all_x = 0, all_y = 0;
    for (size_t i = 0; i < in_x.size(); all_x += brought[i++]) {
      (*places)[in_x[i]] = {all_x, -1, brought[i]};
      largest = std::max(largest, brought[i]);
    }
    for (size_t i = 0; i < in_y.size(); all_y += got[i++]) {
      Place& place = (*places)[in_y[i]];
      place.y = all_y;
      place.count = got[i];
      largest = std::max(largest, got[i]);
    }
    piece = RoundUp(piece, unit);
    Layout layout(all_x + all_y, 0, chunks, piece, Parts(largest, piece));
    layout.places_ = std::move(places);
    return layout;
  }

  // How many numbers a piece has, and where its first one is: in x and in y alike, but in a route
  // in x, or in y if it is not in x.
  Span piece(int64_t part, int chunk) const {
    if (places_ != nullptr) {
      const Place& place = (*places_)[chunk];
      return Of(place, part, place.x >= 0 ? place.x : place.y);
    }
    if (sharded_) {
      const int64_t begin = std::min(part * piece_, shard_), end = std::min(begin + piece_, shard_);
      return {chunk * shard_ + begin, end - begin};
    }
    const int64_t begin = std::min((part * chunks_ + chunk) * piece_, count_);
    return {begin, std::min(begin + piece_, count_) - begin};
  }

  // Where it is in y.
  Span in_y(int64_t part, int chunk) const {
    if (places_ == nullptr) return piece(part, chunk);
    return Of((*places_)[chunk], part, (*places_)[chunk].y);
  }
  bool is_in_y(int chunk) const { return places_ == nullptr || (*places_)[chunk].y >= 0; }

  int64_t count() const { return count_; }
  int64_t parts() const { return parts_; }
  int64_t piece_size() const { return piece_; }
  int chunks() const { return chunks_; }

 private:
  // Of a chunk of a route: its first number in x and in y, -1 where it does not lie.
  struct Place {
    int64_t x = -1, y = -1, count = 0;
  };

  Span Of(const Place& place, int64_t part, int64_t first) const {
    const int64_t begin = std::min(part * piece_, place.count);
    return {first + begin, std::min(begin + piece_, place.count) - begin};
  }

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
  std::shared_ptr<const std::vector<Place>> places_;  // of a route
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_LAYOUT_H_
