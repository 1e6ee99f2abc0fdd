// What travels over a connection: frames, each a header and perhaps the bytes of a message.
//
// Small messages go at once, and the receiver answers when it has taken them. A large one goes
// when the receiver has asked for it: so its bytes never wait in anybody's memory, and none
// holds up another. Receives are posted ahead, so the question is there before its answer.
#ifndef TFSCALE_TRANSPORT_SOCKETS_FRAME_H_
#define TFSCALE_TRANSPORT_SOCKETS_FRAME_H_

#include <cstddef>
#include <cstdint>

#include "custom_ops/engine/transport.h"

namespace tfscale {
namespace sockets {

// Changes whenever two builds could no longer talk to each other.
inline constexpr uint32_t kVersion = 3;

inline constexpr size_t kSmall = size_t{32} << 10;  // messages of no more go unasked

struct Frame {
  enum Kind : uint32_t {
    kData = 1,      // the bytes of a message follow
    kMore = 2,      // shared memory alone: further bytes of the last message
    kWant = 3,      // a receiver waits for a large message
    kUnwant = 4,    // it does no longer
    kTaken = 5,     // a receiver has taken a small message
    kWithdraw = 6,  // a sender does not offer a small message any more
    kSkip = 7,      // shared memory alone: nothing until the end of the ring
  };
  static constexpr uint32_t kMagic = 0x7f5ca1e5;

  uint32_t magic = kMagic;
  uint32_t kind = kData;
  uint64_t size = 0;    // of the message
  uint64_t number = 0;  // of a small message, among those of its sender
  uint64_t here = 0;    // shared memory alone: how many of its bytes follow
  Key key = {};
};
static_assert(sizeof(Key) == 32 && sizeof(Frame) == 64, "frames of all builds are alike");

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_FRAME_H_
