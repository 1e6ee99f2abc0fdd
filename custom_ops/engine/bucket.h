// What the numbers of one collective are, as their user knows them.
#ifndef TFSCALE_ENGINE_BUCKET_H_
#define TFSCALE_ENGINE_BUCKET_H_

#include <cstdint>
#include <string>
#include <tuple>

namespace tfscale {

struct BucketId {
  std::string label;       // what it holds
  std::string owner = "";  // the optimizer whose gradients these are; empty for all else
  std::string graph = "";  // where it was traced; empty for eager ops
  int64_t number = 0;  // which one of this label and owner in the graph, from 1; 0 for eager ops

  // Its name in errors, as in tfscale/native/bucket.py.
  std::string Name() const {
    std::string name = graph.empty() ? "" : graph + "/";
    if (!owner.empty()) name += owner + " ";
    name += label;
    return number == 0 ? name : name + "_" + std::to_string(number);
  }

  friend bool operator<(const BucketId& a, const BucketId& b) {
    return std::tie(a.label, a.owner, a.graph, a.number) <
           std::tie(b.label, b.owner, b.graph, b.number);
  }
};

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_BUCKET_H_
