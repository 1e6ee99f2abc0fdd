// Available instruction sets, and the choice of one.
#include <cstdlib>
#include <string_view>

#include "custom_ops/wire/kernels.h"

namespace tfscale {
namespace wire {
namespace {

#if defined(__x86_64__)
constexpr std::string_view kBaseName = "sse2";
#elif defined(__aarch64__)
constexpr std::string_view kBaseName = "neon";
#else
constexpr std::string_view kBaseName = "portable";
#endif

bool HasAvx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

bool HasAvx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

// Returns the highest level that TFSCALE_SIMD allows.
Level Allowed() {
  const char* value = std::getenv("TFSCALE_SIMD");
  const std::string_view name = value == nullptr ? "" : value;
  if (name == "avx2") return Level::kAvx2;
  if (name == "sse2" || name == "neon" || name == "portable") return Level::kBase;
  return Level::kAvx512;
}

Level Choose() {
  const Level allowed = Allowed();
  if (allowed >= Level::kAvx512 && Available(Level::kAvx512)) return Level::kAvx512;
  if (allowed >= Level::kAvx2 && Available(Level::kAvx2)) return Level::kAvx2;
  return Level::kBase;
}

}  // namespace

bool Available(Level level) {
  switch (level) {
    case Level::kBase:
      return true;
    case Level::kAvx2:
      return HasAvx2();
    case Level::kAvx512:
      return HasAvx2() && HasAvx512();
  }
  return false;
}

std::string_view LevelName(Level level) {
  switch (level) {
    case Level::kBase:
      return kBaseName;
    case Level::kAvx2:
      return "avx2";
    case Level::kAvx512:
      return "avx512";
  }
  return kBaseName;
}

Level ChosenLevel() {
  static const Level level = Choose();
  return level;
}

std::string_view SimdLevel() { return LevelName(ChosenLevel()); }

}  // namespace wire
}  // namespace tfscale
