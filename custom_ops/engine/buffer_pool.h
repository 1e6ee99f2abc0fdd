// Buffers for bytes in flight, used again and again: fresh memory costs a page
// fault for every 4 KiB.
#ifndef TFSCALE_ENGINE_BUFFER_POOL_H_
#define TFSCALE_ENGINE_BUFFER_POOL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "custom_ops/engine/transport.h"

namespace tfscale {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // At most `keep` bytes are kept for later; more than that in use at a time
  // is allocated and freed.
  explicit BufferPool(size_t keep = size_t{64} << 20) : keep_(keep) {}

  // For transports: their messages outlive the collectives that they belong to.
  static BufferPool& OfProcess() {
    static auto* pool = new std::shared_ptr<BufferPool>(std::make_shared<BufferPool>());
    return **pool;
  }

  ~BufferPool() {
    for (auto& shelf : shelves_) {
      for (uint8_t* buffer : shelf.second) Free(buffer);
    }
  }

  View Get(size_t size) {
    const size_t room = RoundUp(size);
    uint8_t* buffer = Take(room);
    if (buffer == nullptr) {
      buffer = static_cast<uint8_t*>(::operator new (room, std::align_val_t{kAlign}));
    }
    std::shared_ptr<BufferPool> pool = shared_from_this();
    return {buffer, size, std::shared_ptr<void>(buffer, [pool, room](void* p) {
              pool->Return(static_cast<uint8_t*>(p), room);
            })};
  }

 private:
  static constexpr size_t kAlign = 64;

  static size_t RoundUp(size_t size) {
    size_t room = 1024;
    while (room < size) room += room / 4 / kAlign * kAlign;
    return room;
  }
  static void Free(uint8_t* buffer) { ::operator delete (buffer, std::align_val_t{kAlign}); }

  uint8_t* Take(size_t room) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto shelf = shelves_.find(room);
    if (shelf == shelves_.end() || shelf->second.empty()) return nullptr;
    uint8_t* buffer = shelf->second.back();
    shelf->second.pop_back();
    kept_ -= room;
    return buffer;
  }

  void Return(uint8_t* buffer, size_t room) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (kept_ + room <= keep_) {
        shelves_[room].push_back(buffer);
        kept_ += room;
        return;
      }
    }
    Free(buffer);
  }

  const size_t keep_;
  std::mutex mutex_;
  size_t kept_ = 0;
  std::map<size_t, std::vector<uint8_t*>> shelves_;
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_BUFFER_POOL_H_
