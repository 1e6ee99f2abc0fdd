// TensorFlow copies each message through heap memory of its own, four times its size.
// Left alone, glibc gives that back to the system after each message, and the next one
// pays a page fault for every 4 KiB: a third of an all-reduce over loopback.
#ifndef TFSCALE_TRANSPORT_HEAP_H_
#define TFSCALE_TRANSPORT_HEAP_H_

namespace tfscale {

// Lets the heap keep up to 64 MiB per arena when it is freed. Once for the process; does
// nothing where the user has tuned malloc himself (MALLOC_..., GLIBC_TUNABLES), or
// without glibc.
void KeepFreedMemory();

}  // namespace tfscale

#endif  // TFSCALE_TRANSPORT_HEAP_H_
