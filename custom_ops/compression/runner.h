// How the work on a gradient is shared out.
#ifndef TFSCALE_COMPRESSION_RUNNER_H_
#define TFSCALE_COMPRESSION_RUNNER_H_

#include <cstdint>
#include <functional>

namespace tfscale {
namespace compression {

// Calls `work` with ranges [first, last) that cover [0, parts) once, on whatever
// threads, and returns when all have returned.
using Work = std::function<void(int64_t first, int64_t last)>;
using Runner = std::function<void(int64_t parts, const Work& work)>;

}  // namespace compression
}  // namespace tfscale

#endif  // TFSCALE_COMPRESSION_RUNNER_H_
