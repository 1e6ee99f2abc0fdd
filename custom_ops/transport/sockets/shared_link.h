// Frames through memory that two processes share. The connection beside it wakes the other side,
// and closes when it ends.
#ifndef TFSCALE_TRANSPORT_SOCKETS_SHARED_LINK_H_
#define TFSCALE_TRANSPORT_SOCKETS_SHARED_LINK_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "custom_ops/transport/sockets/queued_link.h"
#include "custom_ops/transport/sockets/segment.h"

namespace tfscale {
namespace sockets {

class SharedLink : public QueuedLink, public std::enable_shared_from_this<SharedLink> {
 public:
  // `mine`: the ring that this side writes.
  SharedLink(int socket, std::unique_ptr<Segment> segment, int mine, int peer,
             std::weak_ptr<Receiver> receiver);

  std::string Name() const override { return "shared memory"; }
  void Ready(bool read, bool write) override;
  bool Poll() override;
  void Sleeps(bool asleep) override;

 private:
  // Records that are read; their room is free again when all before them are let go of.
  struct Held {
    uint64_t end;
    uint64_t lent;
    bool released;
  };

  bool Write(std::deque<Outgoing>* queue, std::vector<Done>* written) override;
  uint8_t* RoomOrWait(size_t bytes);
  uint8_t* Room(size_t bytes);
  void Publish(size_t bytes);
  void Ring();
  bool Read();
  bool ReadRecord(const Frame& frame, uint8_t* body, uint64_t number);
  void Lend(uint8_t* body, uint64_t number);
  uint64_t Hold(uint64_t end);
  void Release(uint64_t number);

  const std::shared_ptr<Segment> segment_;
  const uint64_t capacity_, most_;  // of a ring; of the bytes of a message in one record
  RingHead* const out_;
  RingHead* const in_;
  uint8_t* const out_bytes_;
  uint8_t* const in_bytes_;

  uint64_t written_ = 0;  // under the lock of the queue

  std::mutex held_mutex_;  // of what follows
  std::deque<Held> held_;
  uint64_t first_held_ = 0;         // the number of the first of them
  std::atomic<uint64_t> lent_{0};   // bytes that others read where they lie
  std::atomic<uint64_t> freed_{0};  // as in the head, where the other side could change it

  uint64_t read_ = 0;  // of the progress thread alone
};

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_SHARED_LINK_H_
