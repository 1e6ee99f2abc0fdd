// Speed of every codec at every instruction set, in GB/s of numbers (not of
// bytes on the wire), one core, in cache and from memory.
//
//   g++ -std=c++17 -O3 -ffp-contract=off -I. custom_ops/wire/*.cc
//       tests/native/codec_benchmark.cc -o codec_benchmark
//   ./codec_benchmark [numbers in cache = 16384] [numbers in memory = 67108864]
//
// "copy" lines are the machine's own bounds: memcpy, and a plain loop that reads
// and writes every number. A codec that reads n numbers and writes fewer bytes
// may be faster than either. Times are this thread's CPU time, the median of some
// repetitions: what other processes take of the core does not count, what they
// take of caches and of memory bandwidth does.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "custom_ops/wire/codec.h"
#include "custom_ops/wire/kernels.h"
#include "tests/native/formats.h"

namespace {

using tfscale::wire::Codec;
using tfscale::wire::Element;
using tfscale::wire::Facts;
using tfscale::wire::kFacts;
using tfscale::wire::Level;
using tfscale::wire::Rounding;

constexpr int kRepetitions = 7;

struct Buffers {
  explicit Buffers(int64_t n) : count(n), x(n), y(n), bytes(n * sizeof(float) + 64) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < n; ++i) x[i] = i < 4096 ? normal(generator) : x[i & 4095];
  }
  int64_t count;
  std::vector<float> x;
  std::vector<float> y;
  std::vector<uint8_t> bytes;
};

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

double Seconds(const std::function<void()>& work, int calls) {
  const double start = ThreadSeconds();
  for (int i = 0; i < calls; ++i) work();
  return ThreadSeconds() - start;
}

// Median GB/s over some repetitions of at least a few milliseconds each.
double Speed(int64_t n, const std::function<void()>& work) {
  const double gigabytes = n * sizeof(float) / 1e9;
  const int calls = std::max(1, static_cast<int>(0.02 / gigabytes));
  work();
  std::vector<double> speeds;
  for (int i = 0; i < kRepetitions; ++i) speeds.push_back(gigabytes * calls / Seconds(work, calls));
  std::sort(speeds.begin(), speeds.end());
  return speeds[kRepetitions / 2];
}

__attribute__((noinline)) void PlainCopy(const float* __restrict x, int64_t n,
                                         float* __restrict y) {
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] + 1.0f;
}

void PrintCopies(Buffers* b) {
  const double memcpy_speed =
      Speed(b->count, [&] { std::memcpy(b->y.data(), b->x.data(), b->count * sizeof(float)); });
  const double plain_speed =
      Speed(b->count, [&] { PlainCopy(b->x.data(), b->count, b->y.data()); });
  std::printf("copy: memcpy %.1f, plain loop %.1f GB/s\n", memcpy_speed, plain_speed);
}

void PrintCodec(const Codec& codec, Level level, bool stochastic, Buffers* b) {
  Rounding rounding;
  rounding.stochastic = stochastic;
  rounding.seed = 7;
  const double encode =
      Speed(b->count, [&] { codec.Encode(b->x.data(), b->count, b->bytes.data() + 1, rounding); });
  const double decode =
      Speed(b->count, [&] { codec.Decode(b->bytes.data() + 1, b->count, b->y.data()); });
  const double add = Speed(
      b->count, [&] { codec.DecodeAdd(b->bytes.data() + 1, b->count, b->y.data(), b->y.data()); });
  std::printf("%-8s %-8s %-10s %8.1f %8.1f %10.1f\n", std::string(codec.name()).c_str(),
              std::string(LevelName(level)).c_str(), stochastic ? "stochastic" : "nearest", encode,
              decode, add);
}

void PrintTable(int64_t n, const std::vector<Level>& levels) {
  Buffers buffers(n);
  std::printf("\n%lld numbers\n", static_cast<long long>(n));
  PrintCopies(&buffers);
  std::printf("%-8s %-8s %-10s %8s %8s %10s\n", "format", "level", "rounding", "encode", "decode",
              "decode_add");
  for (const Facts& facts : kFacts) {
    for (Level level : levels) {
      const Codec* codec = FindAt(level, facts.format, Element::kFloat32);
      if (codec == nullptr || (codec->lossless() && level != levels.front())) continue;
      PrintCodec(*codec, level, false, &buffers);
      if (RoundsAtRandom(facts.format)) PrintCodec(*codec, level, true, &buffers);
    }
  }
  PrintCopies(&buffers);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t in_cache = argc > 1 ? std::atoll(argv[1]) : 1 << 14;
  const int64_t in_memory = argc > 2 ? std::atoll(argv[2]) : 1 << 26;
  std::printf("chosen level: %s\n", std::string(tfscale::wire::SimdLevel()).c_str());
  PrintTable(in_cache, {Level::kBase, Level::kAvx2, Level::kAvx512});
  if (in_memory > 0) PrintTable(in_memory, {tfscale::wire::ChosenLevel()});
  return 0;
}
