#include "custom_ops/compression/select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

namespace tfscale {
namespace compression {
namespace {

constexpr int64_t kPart = 1 << 16;    // numbers that a thread takes at once
constexpr int64_t kRow = 32;          // numbers that one comparison covers
constexpr int64_t kSample = 1 << 14;  // least size of a sample, if there are as many numbers

constexpr uint32_t kLeast = 1;  // all numbers except zeros reach this size

struct Candidate {
  uint32_t size;
  int32_t place;
  float number;
};

// Returns a float's bits without the sign: larger magnitudes have larger bits, NaN the largest.
uint32_t SizeOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits & 0x7fffffffu;
}

// Input of the search: the numbers of one array, or the sums of two.
struct Numbers {
  const float* x;
  const float* rest;

  float operator[](int64_t i) const { return rest == nullptr ? x[i] : x[i] + rest[i]; }

  void Row(int64_t first, int64_t count, float* row) const {
    if (rest == nullptr) {
      for (int64_t i = 0; i < count; ++i) row[i] = x[first + i];
    } else {
      for (int64_t i = 0; i < count; ++i) row[i] = x[first + i] + rest[first + i];
    }
  }
};

// Returns a size that most likely a few more than k numbers reach.
uint32_t Guess(const Numbers& x, int64_t n, int64_t k) {
  const int64_t stride = std::max<int64_t>(1, n / std::max(kSample, n / 256));
  std::vector<uint32_t> sample;
  sample.reserve(n / stride + 1);
  for (int64_t i = stride / 2; i < n; i += stride) sample.push_back(SizeOf(x[i]));
  const double expected = static_cast<double>(k) * sample.size() / n;
  const auto rank = static_cast<size_t>(expected + 4 * std::sqrt(expected) + 4);
  if (rank >= sample.size()) return kLeast;
  std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<>());
  return std::max(sample[rank], kLeast);
}

void Collect(const Numbers& x, int64_t first, int64_t last, uint32_t size,
             std::vector<Candidate>* found) {
  float row[kRow];
  for (int64_t start = first; start < last; start += kRow) {
    const int64_t count = std::min(kRow, last - start);
    uint32_t largest = 0;
    if (count == kRow) {
      x.Row(start, kRow, row);
      for (int64_t i = 0; i < kRow; ++i) largest = std::max(largest, SizeOf(row[i]));
      if (largest < size) continue;
    } else {
      x.Row(start, count, row);
    }
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t one = SizeOf(row[i]);
      if (one >= size) found->push_back({one, static_cast<int32_t>(start + i), row[i]});
    }
  }
}

// Returns all numbers that reach a size, in consecutive parts.
std::vector<std::vector<Candidate>> Reaching(const Numbers& x, int64_t n, uint32_t size,
                                             const Runner& run) {
  const int64_t parts = (n + kPart - 1) / kPart;
  std::vector<std::vector<Candidate>> found(parts);
  run(parts, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      Collect(x, part * kPart, std::min(n, (part + 1) * kPart), size, &found[part]);
    }
  });
  return found;
}

std::vector<uint32_t> SizesOf(const std::vector<std::vector<Candidate>>& parts) {
  std::vector<uint32_t> sizes;
  for (const auto& part : parts) {
    for (const Candidate& one : part) sizes.push_back(one.size);
  }
  return sizes;
}

// Writes all numbers that are not zero, fewer than k, and the first of the zeros.
void AllAndZeros(const Numbers& x, int64_t n, int64_t k, int64_t zeros, int32_t* places,
                 float* numbers) {
  const int32_t* end = places + k;
  for (int64_t i = 0; i < n && places < end; ++i) {
    if (SizeOf(x[i]) < kLeast && zeros-- <= 0) continue;
    *places++ = static_cast<int32_t>(i);
    *numbers++ = x[i];
  }
}

}  // namespace

void Largest(const float* x, const float* rest, int64_t n, int64_t k, int32_t* places,
             float* numbers, const Runner& run) {
  if (k == 0) return;
  const Numbers all{x, rest};
  const uint32_t guess = Guess(all, n, k);
  auto parts = Reaching(all, n, guess, run);
  std::vector<uint32_t> sizes = SizesOf(parts);
  const auto too_few = [&] { return static_cast<int64_t>(sizes.size()) < k; };
  if (too_few() && guess > kLeast) {
    parts = Reaching(all, n, kLeast, run);
    sizes = SizesOf(parts);
  }
  if (too_few()) return AllAndZeros(all, n, k, k - sizes.size(), places, numbers);
  std::nth_element(sizes.begin(), sizes.begin() + (k - 1), sizes.end(), std::greater<>());
  const uint32_t least = sizes[k - 1];
  int64_t equal = k - std::count_if(sizes.begin(), sizes.begin() + (k - 1),
                                    [least](uint32_t size) { return size > least; });
  for (const auto& part : parts) {
    for (const Candidate& one : part) {
      if (one.size < least || (one.size == least && equal-- <= 0)) continue;
      *places++ = one.place;
      *numbers++ = one.number;
    }
  }
}

void Keep(const float* x, float* rest, int64_t n, const int32_t* places, const float* kept,
          int64_t k, const Runner& run) {
  run((n + kPart - 1) / kPart, [=](int64_t first, int64_t last) {
    const int64_t end = std::min(n, last * kPart);
    for (int64_t i = first * kPart; i < end; ++i) rest[i] += x[i];
  });
  for (int64_t i = 0; i < k; ++i) rest[places[i]] = kept[i];
}

bool AreWithin(const int32_t* places, int64_t count, int64_t size) {
  return std::all_of(places, places + count,
                     [size](int32_t place) { return 0 <= place && place < size; });
}

void Add(const float* values, const int32_t* places, int64_t count, float* sums) {
  for (int64_t i = 0; i < count; ++i) sums[places[i]] += values[i];
}

}  // namespace compression
}  // namespace tfscale
