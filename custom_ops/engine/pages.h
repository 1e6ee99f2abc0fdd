// Fresh memory comes in pages of 4 KiB, with a page fault for each. Where Linux keeps
// huge pages for those who ask ("madvise", as on Debian and Ubuntu), this asks.
#ifndef TFSCALE_ENGINE_PAGES_H_
#define TFSCALE_ENGINE_PAGES_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace tfscale {

// To be called before the memory is touched. It does nothing for memory that is in use.
inline void AskForHugePages(void* memory, size_t bytes) {
  constexpr size_t kLeast = size_t{4} << 20;  // two huge pages
  if (bytes < kLeast) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (start + page - 1) / page * page;
  const uintptr_t end = (start + bytes) / page * page;
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

}  // namespace tfscale

#endif  // TFSCALE_ENGINE_PAGES_H_
