// The threads that TensorFlow gives to an op's loops.
#ifndef TFSCALE_KERNELS_WORKERS_H_
#define TFSCALE_KERNELS_WORKERS_H_

#include <cstdint>
#include <functional>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/platform/denormal.h"

namespace tfscale {

// Returns a function that shares out parts of `cycles_per_part` each; from the cycles TensorFlow
// chooses how many threads to use. TensorFlow's worker threads flush denormals to zero, a Python
// thread does not: all are made to, or a result would depend on where it was computed.
inline auto OnWorkers(tensorflow::OpKernelContext* ctx, int64_t cycles_per_part) {
  auto* workers = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  return
      [workers, cycles_per_part](int64_t parts, const std::function<void(int64_t, int64_t)>& work) {
        const auto flushing = [&work](int64_t first, int64_t last) {
          const tensorflow::port::ScopedFlushDenormal flush;
          work(first, last);
        };
        if (parts <= 1) return flushing(0, parts);
        workers->ParallelFor(parts, cycles_per_part, flushing);
      };
}

}  // namespace tfscale

#endif  // TFSCALE_KERNELS_WORKERS_H_
