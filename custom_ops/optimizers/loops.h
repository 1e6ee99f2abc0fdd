// The loops of kernels.h. Each kernels_*.cc compiles them for its instruction set; the rules of
// wire/block.h apply.
#ifndef TFSCALE_OPTIMIZERS_LOOPS_H_
#define TFSCALE_OPTIMIZERS_LOOPS_H_

#include <cstdint>

#include "custom_ops/optimizers/kernels.h"
#include "custom_ops/optimizers/numbers.h"
#include "custom_ops/wire/independent.h"

namespace tfscale {
namespace optimizers {
namespace {

constexpr int kLanes = 16;
// Tiles are short, since reading several arrays in turns is slower if turns are long.
constexpr int kTile = 128;

// Every instruction set adds the same numbers in the same order: number i to
// lane i mod kLanes, and the lanes at the end. In float64 no square of a float
// overflows, vanishes or is rounded.
class SumOfSquares {
 public:
  template <class Number>
  void Add(const typename Number::Stored* x, int64_t count) {
    double lanes[kLanes];
    __builtin_memcpy(lanes, lanes_, sizeof(lanes));
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += Square(Number::Widen(x[i + lane]));
    }
    for (int lane = 0; i + lane < count; ++lane) lanes[lane] += Square(Number::Widen(x[i + lane]));
    __builtin_memcpy(lanes_, lanes, sizeof(lanes));
  }

  double Total() const {
    double total = 0;
    for (double lane : lanes_) total += lane;
    return total;
  }

 private:
  static double Square(double x) { return x * x; }

  double lanes_[kLanes] = {};
};

inline float LambDirection(const LambNumbers& rule, float w, float m, float v) {
  const float root = __builtin_sqrtf(v * rule.correction_2);
  return m * rule.correction_1 / (root + rule.epsilon) + rule.weight_decay * w;
}

// Computes a tile's new moments, and writes its directions to u.
template <class Number>
void LambTile(LambNumbers rule, const typename Number::Stored* g, const typename Number::Stored* w,
              float* m, float* v, int64_t count, float* u) {
  TFSCALE_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const float gradient = Number::Widen(g[i]);
    m[i] = rule.beta_1 * m[i] + rule.rest_1 * gradient;
    v[i] = rule.beta_2 * v[i] + rule.rest_2 * (gradient * gradient);
    u[i] = LambDirection(rule, Number::Widen(w[i]), m[i], v[i]);
  }
}

template <class Number>
void LambMoments(const LambNumbers& rule, const Arrays& a, SquaredNorms* norms) {
  const auto* g = static_cast<const typename Number::Stored*>(a.g);
  const auto* w = static_cast<const typename Number::Stored*>(a.w);
  SumOfSquares weights, directions;
  for (int64_t i = 0; i < a.count; i += kTile) {
    const int64_t count = a.count - i < kTile ? a.count - i : kTile;
    float u[kTile];
    LambTile<Number>(rule, g + i, w + i, a.m + i, a.v + i, count, u);
    weights.Add<Number>(w + i, count);
    directions.Add<Float32>(u, count);
  }
  *norms = {weights.Total(), directions.Total()};
}

template <class Number>
void LambUpdate(const LambNumbers& numbers, float step, const Arrays& a) {
  const LambNumbers rule = numbers;
  auto* w = static_cast<typename Number::Stored*>(a.w);
  const float* m = a.m;
  const float* v = a.v;
  TFSCALE_INDEPENDENT
  for (int64_t i = 0; i < a.count; ++i) {
    const float x = Number::Widen(w[i]);
    w[i] = Number::Narrow(x - step * LambDirection(rule, x, m[i], v[i]));
  }
}

template <class Number>
void LarsNorms(const Arrays& a, SquaredNorms* norms) {
  const auto* g = static_cast<const typename Number::Stored*>(a.g);
  const auto* w = static_cast<const typename Number::Stored*>(a.w);
  SumOfSquares weights, gradients;
  for (int64_t i = 0; i < a.count; i += kTile) {
    const int64_t count = a.count - i < kTile ? a.count - i : kTile;
    weights.Add<Number>(w + i, count);
    gradients.Add<Number>(g + i, count);
  }
  *norms = {weights.Total(), gradients.Total()};
}

template <class Number, bool kNesterov>
void LarsMove(LarsStep step, const Arrays& a) {
  const auto* g = static_cast<const typename Number::Stored*>(a.g);
  auto* w = static_cast<typename Number::Stored*>(a.w);
  float* m = a.m;
  TFSCALE_INDEPENDENT
  for (int64_t i = 0; i < a.count; ++i) {
    const float x = Number::Widen(w[i]);
    const float d = step.scale * (Number::Widen(g[i]) + step.weight_decay * x);
    m[i] = step.momentum * m[i] + d;
    const float moved = kNesterov ? step.momentum * m[i] + d : m[i];
    w[i] = Number::Narrow(x - step.outer * moved);
  }
}

template <class Number>
void LarsUpdate(const LarsStep& step, const Arrays& a) {
  step.nesterov ? LarsMove<Number, true>(step, a) : LarsMove<Number, false>(step, a);
}

template <class Number>
constexpr Kernels KernelsOf() {
  return {LambMoments<Number>, LambUpdate<Number>, LarsNorms<Number>, LarsUpdate<Number>};
}

constexpr Kernels kFloat32 = KernelsOf<Float32>();
constexpr Kernels kBfloat16 = KernelsOf<Bfloat16>();
constexpr Kernels kFloat16 = KernelsOf<Float16>();

inline const Kernels* KernelsFor(Type type) {
  switch (type) {
    case Type::kFloat32:
      return &kFloat32;
    case Type::kBfloat16:
      return &kBfloat16;
    case Type::kFloat16:
      return &kFloat16;
  }
  return nullptr;
}

}  // namespace
}  // namespace optimizers
}  // namespace tfscale

#endif  // TFSCALE_OPTIMIZERS_LOOPS_H_
