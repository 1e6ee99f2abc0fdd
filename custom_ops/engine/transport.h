// How bytes get from one rank to another. The engine asks for nothing more
// than this: a new network is one more file that implements it.
#ifndef TFSCALE_ENGINE_TRANSPORT_H_
#define TFSCALE_ENGINE_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "custom_ops/engine/status.h"

namespace tfscale {

// How messages go between ranks of one process; as WITHIN_PROCESS in tfscale/native/transport.py.
inline constexpr char kWithinProcess[] = "the same process";

// Names one message between two ranks. A sender and a receiver meet when their
// keys are equal; a key is used once in the life of a communicator.
struct Key {
  uint64_t collective;  // which collective, with what signature: see keys.h; 0: of none
  uint32_t generation;  // how often the communicator has failed before
  uint32_t execution;   // how often this collective ran before
  uint32_t part;
  uint32_t kind;         // one of those below
  uint32_t first, last;  // the chunks [first, last) that it carries
};

inline constexpr uint32_t kPartialMessage = 0;
inline constexpr uint32_t kFinalMessage = 1;
inline constexpr uint32_t kHelloMessage = 2;
inline constexpr uint32_t kFarewellMessage = 3;
inline constexpr uint32_t kPulseMessage = 4;
inline constexpr uint32_t kFormingMessage = 5;

// Memory that somebody else owns; `owner` keeps it alive.
struct View {
  uint8_t* data = nullptr;
  size_t size = 0;
  std::shared_ptr<void> owner;
};

using Done = std::function<void(Status)>;
using Taken = std::function<void(Status, View)>;

// The sender's bytes themselves, for as long as the receiver holds them; then `done`.
inline View Lent(const View& bytes, Done done) {
  return {bytes.data, bytes.size,
          std::shared_ptr<void>(bytes.data, [bytes, done](void*) { done(Status()); })};
}

// The messages of one collective on one rank. Every `done` is called exactly
// once, from any thread, perhaps before the call returns. Cancel() ends all
// that is still pending, now and later, with kCancelled.
class Channel {
 public:
  virtual ~Channel() = default;

  // Offers bytes to a peer. They must not change until `done`: the peer has
  // then taken them.
  virtual void Post(int to, const Key& key, View bytes, Done done) = 0;

  // Takes the peer's bytes of exactly the size of `into`, and tells where they are: in `into`
  // itself, or, if that has no address, wherever the transport has them. The peer may wait until
  // the view that `done` gets is let go of.
  virtual void Receive(int from, const Key& key, View into, Taken done) = 0;

  virtual void Cancel() = 0;

  // Whether a Receive costs nothing while nothing comes, and ends at once when its peer is gone.
  virtual bool awaits_for_free() const { return false; }
};

using Open = std::function<std::shared_ptr<Channel>()>;

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_TRANSPORT_H_
