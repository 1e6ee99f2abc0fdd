// Messages over TensorFlow's collective runtime: what CollectiveReduce itself
// travels on, in one process (memory) and between processes (gRPC).
#ifndef TFSCALE_TRANSPORT_TENSORFLOW_H_
#define TFSCALE_TRANSPORT_TENSORFLOW_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "custom_ops/engine/transport.h"
#include "tensorflow/core/framework/collective.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfscale {

// The members of a group, in rank order, as TensorFlow resolved them.
using Group = std::shared_ptr<const tensorflow::CollGroupParams>;

// Waits until all of `devices` (full names, in rank order) have come together;
// `done` gets the group or the reason why there is none. Ends at the latest
// after `seconds`.
void FormGroup(tensorflow::OpKernelContext* ctx, int group_key,
               const std::vector<std::string>& devices, double seconds,
               std::function<void(absl::Status, Group)> done);

// Opens channels for the op that runs in `ctx`; it may outlive `ctx`.
std::function<std::shared_ptr<Channel>()> ChannelsOf(tensorflow::OpKernelContext* ctx, Group group,
                                                     int rank);

absl::Status ToAbsl(const Status& status);

// Marks an error of which the other ranks hear without being told, or cannot be told. Python looks
// for it (native/library.py).
absl::Status KnownToAll(absl::Status status);

}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_TENSORFLOW_H_
