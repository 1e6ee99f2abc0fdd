#include "custom_ops/compression/low_rank.h"

#include <algorithm>

namespace tfscale {
namespace compression {
namespace {

constexpr int64_t kNumbers = 1 << 16;  // numbers that a thread takes at once
constexpr int64_t kSums = 8;           // sums over parts of the rows, which are added in order

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

// Calls visit(first row, last row) for independent parts of the rows.
template <typename Visit>
void ByRows(const Matrix& m, const Runner& run, const Visit& visit) {
  const int64_t rows = std::max<int64_t>(1, kNumbers / std::max<int64_t>(1, m.columns));
  run((m.rows + rows - 1) / rows,
      [&](int64_t first, int64_t last) { visit(first * rows, std::min(m.rows, last * rows)); });
}

}  // namespace

void Project(const Matrix& m, const float* factor, float* product, const Runner& run,
             wire::Level level) {
  const Kernels& kernels = KernelsAt(level);
  ByRows(m, run,
         [&](int64_t first, int64_t last) { kernels.project(m, first, last, factor, product); });
}

int64_t Sums(const Matrix& m) { return std::min(kSums, m.rows); }

void ProjectBack(const Matrix& m, const float* basis, float* sums, float* own, const Runner& run,
                 wire::Level level) {
  const Kernels& kernels = KernelsAt(level);
  const int64_t size = m.rank * m.columns, parts = Sums(m);
  std::fill_n(sums, parts * size, 0.0f);
  run(parts, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      kernels.back(m, m.rows * part / parts, m.rows * (part + 1) / parts, basis,
                   sums + part * size);
    }
  });
  std::fill_n(own, size, 0.0f);
  for (int64_t part = 0; part < parts; ++part) {
    const float* one = sums + part * size;
    for (int64_t i = 0; i < size; ++i) own[i] += one[i];
  }
}

void Finish(const Matrix& m, const float* basis, const float* own, const float* total, float* sum,
            const Runner& run, wire::Level level) {
  const Kernels& kernels = KernelsAt(level);
  ByRows(m, run, [&](int64_t first, int64_t last) {
    kernels.finish(m, first, last, basis, own, total, sum);
  });
}

}  // namespace compression
}  // namespace tfscale
