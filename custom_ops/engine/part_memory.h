// Where the bytes of one part lie: in x, in y, or in buffers of the pool.
#ifndef TFSCALE_ENGINE_PART_MEMORY_H_
#define TFSCALE_ENGINE_PART_MEMORY_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "custom_ops/engine/buffer_pool.h"
#include "custom_ops/engine/request.h"

namespace tfscale {

class PartMemory {
 public:
  // Bytes that were received and not yet added.
  struct Addend {
    const uint8_t* bytes;
    std::shared_ptr<void> owner;
  };

  PartMemory(const Request& request, int64_t part, BufferPool* pool);

  int64_t part() const { return part_; }
  Span PieceOf(int chunk) const { return request_.layout.piece(part_, chunk); }

  // What this rank has of a piece is in y once something put it there; before, it is in x.
  const uint8_t* Base(int chunk) const;
  uint8_t* Y(int chunk) const;
  void NowInY(int chunk) { pieces_[chunk].in_y = true; }

  // Only on a wire that is not lossless: what to add, and the final bytes.
  std::vector<Addend>& addends(int chunk) { return pieces_[chunk].addends; }
  uint8_t* Final(int chunk) const { return final_bytes_.data + offsets_[chunk]; }

  int64_t MessageBytes(const Move& move) const;

  // The message of a move where its bytes lie, if they lie side by side; else nothing.
  View InPlace(const Move& move) const;

  // Where to receive the message of a move: of size 0 if there is none, and without an address
  // if any place will do.
  View PlaceFor(int move) const;

  // The message of a move, where the transport has it; nothing if it was received in place.
  void Give(int move, View bytes) { received_[move] = std::move(bytes); }
  View Take(int move) { return std::move(received_[move]); }

 private:
  struct Piece {
    bool in_y = false;
    std::vector<Addend> addends;
  };

  const Request& request_;
  const int64_t part_;
  std::vector<Piece> pieces_;     // per chunk
  std::vector<View> received_;    // per move that receives where the transport likes
  View final_bytes_;              // of all chunks, one after the other
  std::vector<int64_t> offsets_;  // per chunk, into final_bytes_
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_PART_MEMORY_H_
