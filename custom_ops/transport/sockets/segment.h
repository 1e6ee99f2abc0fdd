// Memory that two processes share: a ring of records in each direction.
//
// It is a file without a name in memory, which the other process opens by this one's list of
// open files: nothing is left behind, however a process ends, and no folder's size limits it. Its
// size is sealed before it is offered, and nobody maps one that is not.
// The records of a ring do not wrap around: a process can read one where it lies.
#ifndef TFSCALE_TRANSPORT_SOCKETS_SEGMENT_H_
#define TFSCALE_TRANSPORT_SOCKETS_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "custom_ops/engine/status.h"

namespace tfscale {
namespace sockets {

// Counts of bytes since the beginning; each is written by one side alone.
struct RingHead {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> freed;
  alignas(64) std::atomic<uint32_t> reader_sleeps;  // it is to be rung for
  std::atomic<uint32_t> writer_waits;               // for room; it is to be rung for
};

class Segment {
 public:
  static constexpr size_t kNonce = 32;

  // Both give nothing and say why not, if there can be none.
  static std::unique_ptr<Segment> Make(size_t ring_bytes, const std::string& nonce, Status* status);
  static std::unique_ptr<Segment> Open(int64_t process, int file, size_t ring_bytes,
                                       const std::string& nonce, Status* status);
  ~Segment();

  int file() const { return file_; }
  void CloseFile();  // both have the memory now

  size_t ring_bytes() const { return ring_bytes_; }
  RingHead* head(int ring) const;
  uint8_t* ring(int ring) const;

 private:
  Segment(int file, uint8_t* memory, size_t ring_bytes)
      : file_(file), memory_(memory), ring_bytes_(ring_bytes) {}
  static std::unique_ptr<Segment> Map(int file, size_t ring_bytes, Status* status);
  static size_t Bytes(size_t ring_bytes);

  int file_;
  uint8_t* const memory_;
  const size_t ring_bytes_;
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_SEGMENT_H_
