#include "custom_ops/search/scan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

namespace tfscale {
namespace search {
namespace {

constexpr int64_t kBlock = 256;  // classes between two looks at the limits
constexpr int64_t kTile = 64;    // buckets whose codes are written at a time
constexpr int kLargestCode = 255;

const Kernels& KernelsAt(wire::Level level) {
  switch (level) {
    case wire::Level::kBase:
      break;
    case wire::Level::kAvx2:
      return *Avx2Kernels();
    case wire::Level::kAvx512:
      return *Avx512Kernels();
  }
  return *BaseKernels();
}

int64_t LanesFor(int64_t samples) { return samples > kFew ? kMany : kFew; }

struct Candidate {
  float sum;
  int32_t label;
};

bool IsBetter(const Candidate& a, const Candidate& b) {
  return a.sum != b.sum ? a.sum > b.sum : a.label < b.label;
}

// The k best candidates so far, the worst one first.
class Heap {
 public:
  explicit Heap(int64_t k) : k_(k) {}

  bool IsFull() const { return static_cast<int64_t>(kept_.size()) == k_; }
  float Worst() const { return kept_.front().sum; }
  const std::vector<Candidate>& kept() const { return kept_; }

  // Returns whether the candidate is one of the k best.
  bool Offer(const Candidate& candidate) {
    if (!IsFull()) {
      kept_.push_back(candidate);
      std::push_heap(kept_.begin(), kept_.end(), IsBetter);
      return true;
    }
    if (!IsBetter(candidate, kept_.front())) return false;
    std::pop_heap(kept_.begin(), kept_.end(), IsBetter);
    kept_.back() = candidate;
    std::push_heap(kept_.begin(), kept_.end(), IsBetter);
    return true;
  }

  void Write(float* sums, int32_t* labels) {
    std::sort_heap(kept_.begin(), kept_.end(), IsBetter);
    for (const Candidate& each : kept_) {
      *sums++ = each.sum;
      *labels++ = each.label;
    }
  }

 private:
  int64_t k_;
  std::vector<Candidate> kept_;
};

// How the values of one sample become codes: a sum of values is at most
// base + step * (sum of codes) + error.
struct Scale {
  std::vector<float> lowest;  // of each repetition
  float step = 0;             // the same for all repetitions, so that codes can be added
  double base = 0;
  double guess = 0;  // sum that the k best probably reach
  double error = 0;  // of sums in float32, and of codes

  // Returns the smallest sum of codes that a class with a sum of values of `worst` may have.
  uint16_t Limit(double worst) const {
    if (!std::isfinite(worst)) return 0;
    const double codes = std::floor((worst - base - error) / step) - 1;
    if (!(codes > 0)) return 0;  // also NaN
    return static_cast<uint16_t>(std::min<double>(codes, kNoSum - 1));
  }
};

// The search for the samples [first, first + count), which fill the lanes of a row.
class Scan {
 public:
  Scan(const Problem& problem, int64_t first, uint8_t* codes, wire::Level level)
      : p_(problem),
        first_(first),
        lanes_(LanesFor(problem.samples)),
        count_(std::min(lanes_, problem.samples - first)),
        codes_(codes),
        reach_(lanes_ == kMany ? KernelsAt(level).many : KernelsAt(level).few),
        scales_(count_),
        best_(count_, Heap(problem.k)) {
    for (Scale& scale : scales_) scale.lowest.resize(p_.repetitions);
  }

  void Encode(const Runner& over_repetitions) {
    std::vector<float> largest(count_ * p_.repetitions);
    over_repetitions(p_.repetitions, [&](int64_t r, int64_t last) {
      for (; r < last; ++r) {
        for (int64_t s = 0; s < count_; ++s) FindRange(r, s, &largest[s * p_.repetitions + r]);
      }
    });
    for (int64_t s = 0; s < count_; ++s) Choose(&largest[s * p_.repetitions], &scales_[s]);
    over_repetitions(p_.repetitions, [&](int64_t r, int64_t last) {
      for (; r < last; ++r) EncodeRepetition(r);
    });
  }

  // Returns whether no class that was left out because of the guess is one of the best.
  bool IsProven() const {
    for (int64_t s = 0; s < count_; ++s) {
      if (!best_[s].IsFull() || !(best_[s].Worst() >= scales_[s].guess)) return false;
    }
    return true;
  }

  void ForgetGuess() {
    guesses_ = false;
    best_.assign(count_, Heap(p_.k));
  }

  bool Read(const Runner& over_classes) {
    std::atomic<bool> valid{true};
    const int64_t parts = (p_.classes + kClassesOfPart - 1) / kClassesOfPart;
    over_classes(parts, [&](int64_t part, int64_t last) {
      const int64_t end = std::min(p_.classes, last * kClassesOfPart);
      if (!ReadClasses(part * kClassesOfPart, end)) valid = false;
    });
    return valid;
  }

  void Write(float* sums, int32_t* labels) {
    for (int64_t s = 0; s < count_; ++s) {
      best_[s].Write(sums + (first_ + s) * p_.k, labels + (first_ + s) * p_.k);
    }
  }

 private:
  const float* Values(int64_t r, int64_t s) const {
    return p_.values + (r * p_.samples + first_ + s) * p_.buckets;
  }

  void FindRange(int64_t r, int64_t s, float* largest) {
    const float* x = Values(r, s);
    float low = x[0], high = x[0];
    for (int64_t b = 1; b < p_.buckets; ++b) {
      low = x[b] < low ? x[b] : low;
      high = x[b] > high ? x[b] : high;
    }
    scales_[s].lowest[r] = low;
    *largest = high;
  }

  void Choose(const float* largest, Scale* scale) const {
    double widest = 0, magnitudes = 0;
    for (int64_t r = 0; r < p_.repetitions; ++r) {
      const double low = scale->lowest[r], high = largest[r];
      widest = std::max(widest, high - low);
      scale->base += low;
      magnitudes += std::max(std::fabs(low), std::fabs(high));
    }
    scale->step = static_cast<float>(widest / (kLargestCode - 1));
    scale->error = magnitudes * std::ldexp(static_cast<double>(p_.repetitions) + 4, -22);
    // A bucket has more than k classes, if classes are many, and one has the largest distance.
    scale->guess = scale->base + widest - scale->error;
  }

  // Codes of a value: the next whole number of steps above the lowest one.
  void EncodeRepetition(int64_t r) {
    for (int64_t begin = 0; begin < p_.buckets; begin += kTile) {
      const int64_t width = std::min(kTile, p_.buckets - begin);
      uint8_t* rows = codes_ + (r * p_.buckets + begin) * lanes_;
      for (int64_t s = 0; s < count_; ++s) {
        uint8_t column[kTile];
        EncodeTile(Values(r, s) + begin, width, scales_[s].lowest[r], scales_[s].step, column);
        for (int64_t b = 0; b < width; ++b) rows[b * lanes_ + s] = column[b];
      }
      for (int64_t b = 0; count_ < lanes_ && b < width; ++b) {
        std::fill_n(rows + b * lanes_ + count_, lanes_ - count_, uint8_t{0});
      }
    }
  }

  static void EncodeTile(const float* x, int64_t width, float low, float step, uint8_t* codes) {
    const float factor = step > 0 ? 1 / step : 0;
    for (int64_t b = 0; b < width; ++b) {
      const float steps = (x[b] - low) * factor;
      const int code = steps < kLargestCode - 1 ? static_cast<int>(steps) : kLargestCode - 1;
      codes[b] = static_cast<uint8_t>(code + 1);
    }
  }

  bool ReadClasses(int64_t begin, int64_t end) {
    std::vector<Heap> best(count_, Heap(p_.k));
    std::vector<int32_t> found(kBlock);
    std::vector<uint16_t> sums(kBlock * lanes_), limits = KnownLimits();
    for (; begin < end; begin += kBlock) {
      const int64_t classes = std::min(kBlock, end - begin);
      const int32_t* places = p_.places + begin * p_.repetitions;
      if (!AreBuckets(places, classes)) return false;
      const int64_t reached =
          reach_(codes_, places, p_.repetitions, classes, limits.data(), found.data(), sums.data());
      for (int64_t i = 0; i < reached; ++i) {
        Look(begin + found[i], &sums[i * lanes_], limits.data(), &best);
      }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t s = 0; s < count_; ++s) {
      for (const Candidate& each : best[s].kept()) best_[s].Offer(each);
    }
    return true;
  }

  // Limits by what other threads have found so far.
  std::vector<uint16_t> KnownLimits() {
    std::vector<uint16_t> limits(lanes_, kNoSum);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t s = 0; s < count_; ++s) limits[s] = LimitOf(s, best_[s]);
    return limits;
  }

  // Adds the values of a class for the samples whose limit its codes reach.
  void Look(int64_t label, const uint16_t* sums, uint16_t* limits, std::vector<Heap>* best) const {
    for (int64_t s = 0; s < count_; ++s) {
      if (sums[s] < limits[s]) continue;
      const float sum = Sum(label, s);
      const float comparable = std::isnan(sum) ? -std::numeric_limits<float>::infinity() : sum;
      if ((*best)[s].Offer({comparable, static_cast<int32_t>(label)})) {
        limits[s] = std::max(limits[s], LimitOf(s, (*best)[s]));
      }
    }
  }

  float Sum(int64_t label, int64_t s) const {
    const int32_t* places = p_.places + label * p_.repetitions;
    float sum = 0;
    for (int64_t r = 0; r < p_.repetitions; ++r) {
      sum += Values(r, s)[places[r] - r * p_.buckets];
    }
    return sum;
  }

  uint16_t LimitOf(int64_t s, const Heap& heap) const {
    const Scale& scale = scales_[s];
    const uint16_t guessed = guesses_ ? scale.Limit(scale.guess) : 0;
    return heap.IsFull() ? std::max(guessed, scale.Limit(heap.Worst())) : guessed;
  }

  bool AreBuckets(const int32_t* places, int64_t classes) const {
    bool valid = true;
    for (int64_t c = 0; c < classes; ++c, places += p_.repetitions) {
      for (int64_t r = 0; r < p_.repetitions; ++r) {
        valid &=
            static_cast<uint64_t>(places[r] - r * p_.buckets) < static_cast<uint64_t>(p_.buckets);
      }
    }
    return valid;
  }

  const Problem p_;
  const int64_t first_, lanes_, count_;
  uint8_t* const codes_;
  const Kernels::Reach reach_;
  std::vector<Scale> scales_;
  bool guesses_ = true;
  std::mutex mutex_;
  std::vector<Heap> best_;
};

}  // namespace

int64_t CodeBytes(const Problem& problem) {
  return problem.repetitions * problem.buckets * LanesFor(problem.samples);
}

bool Best(const Problem& problem, uint8_t* codes, float* sums, int32_t* classes,
          const Runner& over_repetitions, const Runner& over_classes, wire::Level level) {
  for (int64_t first = 0; first < problem.samples; first += LanesFor(problem.samples)) {
    Scan scan(problem, first, codes, level);
    scan.Encode(over_repetitions);
    if (!scan.Read(over_classes)) return false;
    if (!scan.IsProven()) {
      scan.ForgetGuess();
      if (!scan.Read(over_classes)) return false;
    }
    scan.Write(sums, classes);
  }
  return true;
}

}  // namespace search
}  // namespace tfscale
