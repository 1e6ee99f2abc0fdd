// Types of functions that share work on a gradient among threads.
#ifndef TFSCALE_COMPRESSION_RUNNER_H_
#define TFSCALE_COMPRESSION_RUNNER_H_

#include <cstdint>
#include <functional>

namespace tfscale {
namespace compression {

// A Runner calls `work` with ranges [first, last) that cover [0, parts) once, on any threads. It
// returns when all calls have returned.
using Work = std::function<void(int64_t first, int64_t last)>;
using Runner = std::function<void(int64_t parts, const Work& work)>;

}  // namespace compression
}  // namespace tfscale

#endif  // TFSCALE_COMPRESSION_RUNNER_H_
