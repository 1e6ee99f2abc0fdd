#ifndef TFSCALE_WIRE_INDEPENDENT_H_
#define TFSCALE_WIRE_INDEPENDENT_H_

// The iterations of the next loop are independent, though its pointers may be
// equal (an operation in place).
#if defined(__clang__)
// Builds with sanitizers or without optimisation can't vectorise, and need not.
#pragma clang diagnostic ignored "-Wpass-failed"
#define TFSCALE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TFSCALE_INDEPENDENT _Pragma("GCC ivdep")
#endif

#endif  // TFSCALE_WIRE_INDEPENDENT_H_
