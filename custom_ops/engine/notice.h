// What ranks tell each other outside the data: who they are, and when they
// give up. See communicator.h for when.
#ifndef TFSCALE_ENGINE_NOTICE_H_
#define TFSCALE_ENGINE_NOTICE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "custom_ops/engine/status.h"

namespace tfscale {

// Changes whenever two builds could no longer talk to each other.
inline constexpr uint32_t kProtocol = 1;

uint64_t Hash(const std::string& text);

// Hello: "this is what I am about to do", `text` is the signature.
// Farewell: "I have given up", `code` and `text` say why.
// Exit: "my program ends", which matters only to ranks that still need this one.
struct Notice {
  enum class Kind : uint8_t { kHello = 1, kFarewell = 2, kExit = 3 };
  static constexpr size_t kBytes = 1024;

  Kind kind = Kind::kHello;
  Code code = Code::kOk;
  uint64_t hash = 0;  // of the whole text, which may be longer than what fits
  std::string text;

  void Write(uint8_t* bytes) const;

  // False for bytes that are not such a notice of this protocol; `why` says so. Where a
  // farewell is expected, an exit may come.
  static bool Read(const uint8_t* bytes, size_t size, Kind expected, Notice* notice,
                   std::string* why);
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_NOTICE_H_
