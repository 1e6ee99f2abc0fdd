// What a collective is to run, and on which memory.
#ifndef TFSCALE_ENGINE_REQUEST_H_
#define TFSCALE_ENGINE_REQUEST_H_

#include <cstdint>
#include <memory>
#include <string>

#include "custom_ops/engine/bucket.h"
#include "custom_ops/engine/layout.h"
#include "custom_ops/engine/program.h"
#include "custom_ops/engine/transport.h"
#include "custom_ops/wire/codec.h"

namespace tfscale {

// `x` holds this rank's contribution and `y` receives the result; both have
// layout.count() numbers and may be the same memory. In a route the layout says where the numbers
// lie in each, and they are not the same memory.
struct Request {
  BucketId bucket;
  std::string name;       // the bucket's, and which iteration of a loop; the same on all ranks
  std::string signature;  // all that ranks must agree on, readable
  int64_t step = 0;       // the caller's step, 0 if unknown: see Communicator
  std::shared_ptr<const Program> program;
  Layout layout = Layout::Joined(0, 1, 1, 1);
  const wire::Codec* codec = nullptr;
  wire::Element element = wire::Element::kFloat32;
  wire::Rounding rounding;
  bool mean = false;
  bool detached = false;  // see Communicator::StartDetached
  bool ragged = false;  // a route whose sizes other ranks do not know
  const uint8_t* x = nullptr;
  uint8_t* y = nullptr;
  const float* residual = nullptr;  // what earlier encodings lost; both or neither
  float* new_residual = nullptr;    // not the same memory
  std::shared_ptr<void> owner;      // keeps all these buffers alive
  Open open;
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_REQUEST_H_
