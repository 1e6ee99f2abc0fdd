// Under which keys the messages of one collective travel.
#ifndef TFSCALE_ENGINE_KEYS_H_
#define TFSCALE_ENGINE_KEYS_H_

#include <cstdint>

#include "custom_ops/engine/request.h"

namespace tfscale {

class Keys {
 public:
  Keys(const Request& request, uint32_t generation, uint32_t execution);

  // Ranks that disagree on the signature never receive each other's data ...
  Key OfData(int64_t part, const Move& move) const;

  // ... but their hellos, which say why.
  Key OfHello() const;

  uint32_t generation() const { return generation_; }

 private:
  const uint64_t data_id_, name_id_;
  const uint32_t generation_, execution_;
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_KEYS_H_
