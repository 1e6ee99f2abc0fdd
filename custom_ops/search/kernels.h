// Sums of codes of many classes, as tables of functions, one table for each instruction set. All
// tables give the same numbers.
#ifndef TFSCALE_SEARCH_KERNELS_H_
#define TFSCALE_SEARCH_KERNELS_H_

#include <cstdint>

namespace tfscale {
namespace search {

// Samples whose codes stand side by side in a row: a cache line holds a row of kMany.
inline constexpr int64_t kMany = 64, kFew = 16;

// A sum of this many codes is below kNoSum.
inline constexpr int64_t kMostRepetitions = 256;
inline constexpr uint16_t kNoSum = 65535;

struct Kernels {
  // Class c has the rows places[c * repetitions + r] of `codes`, which has a code for each lane
  // in a row. Writes the classes whose sum of codes is at least `limits` in any lane to `found`,
  // and their sums of all lanes to `sums`. Returns their number.
  using Reach = int64_t (*)(const uint8_t* codes, const int32_t* places, int64_t repetitions,
                            int64_t classes, const uint16_t* limits, int32_t* found,
                            uint16_t* sums);
  Reach many;  // rows of kMany lanes
  Reach few;   // rows of kFew lanes
};

// Call Avx2Kernels and Avx512Kernels only on a processor that can run them. They return
// nullptr if their instruction set is not compiled in.
const Kernels* BaseKernels();
const Kernels* Avx2Kernels();
const Kernels* Avx512Kernels();

}  // namespace search
}  // namespace tfscale

#endif  // TFSCALE_SEARCH_KERNELS_H_
