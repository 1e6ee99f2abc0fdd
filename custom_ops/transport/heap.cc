#include "custom_ops/transport/heap.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tfscale {

#ifdef __GLIBC__
namespace {

bool TunedByUser() {
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  return tunables != nullptr && std::strstr(tunables, "glibc.malloc.") != nullptr;
}

bool Tune() {
  if (TunedByUser()) return false;
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
  mallopt(M_TOP_PAD, 16 << 20);        // grow in large steps: they, too, cost faults
  mallopt(M_MMAP_THRESHOLD, 8 << 20);  // more than a message, less than most tensors
  return true;
}

}  // namespace

void KeepFreedMemory() { [[maybe_unused]] static const bool tuned = Tune(); }
#else
void KeepFreedMemory() {}
#endif

}  // namespace tfscale
