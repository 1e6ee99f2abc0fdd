#include "custom_ops/engine/notice.h"

#include <algorithm>
#include <cstring>

#include "custom_ops/engine/text.h"

namespace tfscale {
namespace {

// The layout of a notice: a header of fixed width, then the text.
struct Header {
  uint32_t magic;
  uint32_t protocol;
  uint64_t hash;
  uint16_t length;
  uint8_t kind;
  uint8_t code;
  uint32_t reserved;
};
static_assert(sizeof(Header) == 24, "the header must look the same in every build");

constexpr uint32_t kMagic = 0x4e534654;  // "TFSN"
constexpr size_t kRoom = Notice::kBytes - sizeof(Header);

bool Fail(std::string* why, const std::string& reason) {
  *why = reason;
  return false;
}

}  // namespace

uint64_t Hash(const std::string& text) {
  uint64_t h = 0xcbf29ce484222325u;  // FNV-1a
  for (unsigned char c : text) h = (h ^ c) * 0x100000001b3u;
  return h ^ (h >> 29);
}

void Notice::Write(uint8_t* bytes) const {
  const size_t length = std::min(text.size(), kRoom);
  const Header header{kMagic,
                      kProtocol,
                      hash,
                      static_cast<uint16_t>(length),
                      static_cast<uint8_t>(kind),
                      static_cast<uint8_t>(code),
                      0};
  std::memset(bytes, 0, kBytes);
  std::memcpy(bytes, &header, sizeof(header));
  std::memcpy(bytes + sizeof(header), text.data(), length);
}

bool Notice::Read(const uint8_t* bytes, size_t size, Kind expected, Notice* notice,
                  std::string* why) {
  Header header;
  if (size != kBytes) {
    return Fail(why, Text("expected ", kBytes, " bytes, got ", size));
  }
  std::memcpy(&header, bytes, sizeof(header));
  if (header.magic != kMagic) return Fail(why, "these bytes are not a tfscale notice");
  if (header.protocol != kProtocol) {
    return Fail(why, Text("its tfscale speaks protocol ", header.protocol, ", this one ", kProtocol,
                          "; install the same version on every host"));
  }
  // A farewell and an exit have a reason; a hello has none.
  const bool reason = header.code != static_cast<uint8_t>(Code::kOk);
  const auto kind = static_cast<Kind>(header.kind);
  const bool suits = kind == expected || (expected == Kind::kFarewell && kind == Kind::kExit);
  if (!suits || reason != (expected == Kind::kFarewell) ||
      header.code > static_cast<uint8_t>(Code::kInternal) || header.length > kRoom) {
    return Fail(why, "the notice is damaged");
  }
  notice->kind = kind;
  notice->code = static_cast<Code>(header.code);
  notice->hash = header.hash;
  notice->text = Printable(reinterpret_cast<const char*>(bytes) + sizeof(header), header.length);
  return true;
}

}  // namespace tfscale
