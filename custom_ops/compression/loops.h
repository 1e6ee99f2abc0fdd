// The loops of kernels.h. Each kernels_*.cc compiles them for its instruction set; the rules of
// wire/block.h apply.
#ifndef TFSCALE_COMPRESSION_LOOPS_H_
#define TFSCALE_COMPRESSION_LOOPS_H_

#include <cstdint>

#include "custom_ops/compression/kernels.h"
#include "custom_ops/wire/independent.h"

namespace tfscale {
namespace compression {
namespace {

constexpr int kLanes = 16;
constexpr int kTile = 256;    // columns that stay in the first cache
constexpr int kTogether = 4;  // rows that share a pass over a factor

inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// Returns columns [first, first + count) of a row of the matrix; count <= kTile.
inline const float* Read(const Matrix& m, int64_t row, int64_t first, int64_t count, float* tile) {
  const float* g = m.g + row * m.columns + first;
  if (m.rest == nullptr) return g;
  const float* rest = m.rest + row * m.columns + first;
  TFSCALE_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) tile[i] = g[i] + rest[i];
  return tile;
}

// Every instruction set adds the same numbers in the same order: number i to
// lane i mod kLanes, and the lanes at the end.
inline void Dot(const float* x, const float* y, int64_t count, float* lanes) {
  float sums[kLanes];
  __builtin_memcpy(sums, lanes, sizeof(sums));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  }
  for (int lane = 0; i + lane < count; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  __builtin_memcpy(lanes, sums, sizeof(sums));
}

inline float Total(const float* lanes) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

constexpr int kMostRank = 64;  // columns of a product that one pass over a row computes

void ProjectSome(const Matrix& m, int64_t row, int64_t from, int64_t to, const float* factor,
                 float* product) {
  float lanes[kMostRank][kLanes] = {};
  float tile[kTile];
  for (int64_t column = 0; column < m.columns; column += kTile) {
    const int64_t count = Least(kTile, m.columns - column);
    const float* x = Read(m, row, column, count, tile);
    for (int64_t k = from; k < to; ++k)
      Dot(x, factor + k * m.columns + column, count, lanes[k - from]);
  }
  for (int64_t k = from; k < to; ++k) product[row * m.rank + k] = Total(lanes[k - from]);
}

void ProjectRows(const Matrix& m, int64_t first, int64_t last, const float* factor,
                 float* product) {
  for (int64_t row = first; row < last; ++row) {
    for (int64_t k = 0; k < m.rank; k += kMostRank) {
      ProjectSome(m, row, k, Least(k + kMostRank, m.rank), factor, product);
    }
  }
}

inline void AddRows(const float* const* x, const float* p, int64_t stride, int64_t rows,
                    int64_t count, float* sums) {
  if (rows == kTogether) {
    const float a = p[0], b = p[stride], c = p[2 * stride], d = p[3 * stride];
    const float *xa = x[0], *xb = x[1], *xc = x[2], *xd = x[3];
    TFSCALE_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      sums[i] = sums[i] + a * xa[i] + b * xb[i] + c * xc[i] + d * xd[i];
    }
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    const float a = p[row * stride];
    const float* xa = x[row];
    TFSCALE_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) sums[i] += a * xa[i];
  }
}

void BackRows(const Matrix& m, int64_t first, int64_t last, const float* basis, float* own) {
  float tiles[kTogether][kTile];
  for (int64_t row = first; row < last; row += kTogether) {
    const int64_t rows = Least(kTogether, last - row);
    for (int64_t column = 0; column < m.columns; column += kTile) {
      const int64_t count = Least(kTile, m.columns - column);
      const float* x[kTogether];
      for (int64_t i = 0; i < rows; ++i) x[i] = Read(m, row + i, column, count, tiles[i]);
      for (int64_t k = 0; k < m.rank; ++k) {
        AddRows(x, basis + row * m.rank + k, m.rank, rows, count, own + k * m.columns + column);
      }
    }
  }
}

// sums = sum over k of p[k] factor[k], in the order of k.
inline void Combine(const float* p, const float* factor, int64_t rank, int64_t stride,
                    int64_t count, float* sums) {
  const float first = p[0];
  TFSCALE_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) sums[i] = first * factor[i];
  for (int64_t k = 1; k < rank; ++k) {
    const float each = p[k];
    const float* f = factor + k * stride;
    TFSCALE_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) sums[i] += each * f[i];
  }
}

void FinishRows(const Matrix& m, int64_t first, int64_t last, const float* basis, const float* own,
                const float* total, float* sum) {
  float sent[kTile], sums[kTile];
  for (int64_t row = first; row < last; ++row) {
    const float* p = basis + row * m.rank;
    for (int64_t column = 0; column < m.columns; column += kTile) {
      const int64_t count = Least(kTile, m.columns - column);
      const int64_t at = row * m.columns + column;
      if (own != nullptr) {
        const float* g = m.g + at;
        float* rest = m.rest + at;
        Combine(p, own + column, m.rank, m.columns, count, sent);
        TFSCALE_INDEPENDENT
        for (int64_t i = 0; i < count; ++i) rest[i] = g[i] + rest[i] - sent[i];
      }
      Combine(p, total + column, m.rank, m.columns, count, sums);
      __builtin_memcpy(sum + at, sums, count * sizeof(float));
    }
  }
}

constexpr Kernels kKernels = {ProjectRows, BackRows, FinishRows};

}  // namespace
}  // namespace compression
}  // namespace tfscale

#endif  // TFSCALE_COMPRESSION_LOOPS_H_
