#include "custom_ops/engine/keys.h"

#include "custom_ops/engine/notice.h"

namespace tfscale {

Keys::Keys(const Request& request, uint32_t generation, uint32_t execution)
    : data_id_(Hash(request.name + '\n' + request.signature)),
      name_id_(Hash(request.name)),
      generation_(generation),
      execution_(execution) {}

Key Keys::OfData(int64_t part, const Move& move) const {
  const bool final = move.kind == Kind::kAdd ? false : move.final;
  return {data_id_,
          generation_,
          execution_,
          static_cast<uint32_t>(part),
          final ? kFinalMessage : kPartialMessage,
          static_cast<uint32_t>(move.first),
          static_cast<uint32_t>(move.last)};
}

Key Keys::OfHello() const { return {name_id_, generation_, execution_, 0, kHelloMessage, 0, 0}; }

}  // namespace tfscale
