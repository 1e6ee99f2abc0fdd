// Formats to test, as their table says.
#ifndef TFSCALE_TESTS_NATIVE_FORMATS_H_
#define TFSCALE_TESTS_NATIVE_FORMATS_H_

#include <algorithm>
#include <vector>

#include "custom_ops/wire/facts.h"

namespace tfscale {
namespace wire {

inline std::vector<Format> Lossy() {
  std::vector<Format> formats;
  for (const Facts& facts : kFacts) {
    if (facts.format != Format::kFp32) formats.push_back(facts.format);
  }
  return formats;
}

inline bool RoundsAtRandom(Format format) {
  return FactsOf(format).stochastic.least != FactsOf(format).nearest.least ||
         FactsOf(format).stochastic.of_block != FactsOf(format).nearest.of_block;
}

// The most that one encoding to nearest loses, in units of the largest number in its block.
inline double Worst(Format format) {
  const Error& error = FactsOf(format).nearest;
  return std::max(1 / error.of_number, 1 / error.of_block);
}

}  // namespace wire
}  // namespace tfscale

#endif  // TFSCALE_TESTS_NATIVE_FORMATS_H_
