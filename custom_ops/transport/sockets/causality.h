// What one side did before it sent happened before what the other does once it has received.
// ThreadSanitizer cannot see that through a network or through two mappings of the same memory,
// where both sides are in one process, as in tests.
#ifndef TFSCALE_TRANSPORT_SOCKETS_CAUSALITY_H_
#define TFSCALE_TRANSPORT_SOCKETS_CAUSALITY_H_

#ifdef __SANITIZE_THREAD__
extern "C" {
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}
#endif

namespace tfscale {
namespace sockets {

#ifdef __SANITIZE_THREAD__
inline char causality;
inline void Sends() { __tsan_release(&causality); }
inline void HasReceived() { __tsan_acquire(&causality); }
#else
inline void Sends() {}
inline void HasReceived() {}
#endif

}  // namespace sockets
}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_SOCKETS_CAUSALITY_H_
