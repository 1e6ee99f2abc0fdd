#include "custom_ops/optimizers/update.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace tfscale {
namespace optimizers {
namespace {

int64_t Blocks(const Arrays& a) { return (a.count + kBlock - 1) / kBlock; }

Arrays BlockOf(const Arrays& a, Type type, int64_t block) {
  const int64_t first = block * kBlock;
  const int64_t bytes = first * (type == Type::kFloat32 ? 4 : 2);
  return {static_cast<char*>(a.w) + bytes, static_cast<const char*>(a.g) + bytes, a.m + first,
          a.v == nullptr ? nullptr : a.v + first, std::min(kBlock, a.count - first)};
}

// Makes the first pass: adds the norms that `visit` returns, in the order of blocks.
template <typename Visit>
SquaredNorms AddUp(const Arrays& a, Type type, const Runner& run, const Visit& visit) {
  std::vector<SquaredNorms> parts(Blocks(a));
  run(Blocks(a), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) visit(BlockOf(a, type, i), &parts[i]);
  });
  SquaredNorms sum = {0, 0};
  for (const SquaredNorms& part : parts) {
    sum.weights += part.weights;
    sum.other += part.other;
  }
  return sum;
}

// Makes the second pass, from the end, since the last blocks may still be in the cache.
template <typename Visit>
void Move(const Arrays& a, Type type, const Runner& run, const Visit& visit) {
  const int64_t end = Blocks(a) - 1;
  run(Blocks(a), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) visit(BlockOf(a, type, end - i));
  });
}

float LambRatio(const LambNumbers& rule, const SquaredNorms& squares) {
  const double weights = std::sqrt(squares.weights);
  const double direction = std::sqrt(squares.other);
  if (!(weights > 0 && direction > 0)) return 1;
  const double bounded = std::min<double>(std::max<double>(weights, rule.lower), rule.upper);
  return static_cast<float>(bounded / direction);
}

float LarsRatio(const LarsNumbers& rule, const SquaredNorms& squares) {
  const double weights = std::sqrt(squares.weights);
  const double gradient = std::sqrt(squares.other);
  if (!(weights > 0 && gradient > 0)) return 1;
  return static_cast<float>(rule.trust * weights /
                            (gradient + rule.weight_decay * weights + rule.epsilon));
}

// Returns min(ratio / learning_rate, 1), also for a learning rate of 0; NaN stays NaN.
float Clipped(float ratio, float learning_rate) {
  return ratio >= learning_rate ? 1 : ratio / learning_rate;
}

}  // namespace

const Kernels& KernelsAt(wire::Level level, Type type) {
  switch (level) {
    case wire::Level::kBase:
      break;
    case wire::Level::kAvx2:
      return *Avx2Kernels(type);
    case wire::Level::kAvx512:
      return *Avx512Kernels(type);
  }
  return *BaseKernels(type);
}

void Lamb(const LambNumbers& rule, bool adapt, Type type, const Arrays& arrays, const Runner& run,
          wire::Level level) {
  const Kernels& kernels = KernelsAt(level, type);
  const SquaredNorms squares = AddUp(
      arrays, type, run,
      [&](const Arrays& block, SquaredNorms* norms) { kernels.lamb_moments(rule, block, norms); });
  const float step = rule.learning_rate * (adapt ? LambRatio(rule, squares) : 1);
  Move(arrays, type, run, [&](const Arrays& block) { kernels.lamb_update(rule, step, block); });
}

void Lars(const LarsNumbers& rule, const LarsSwitches& switches, Type type, const Arrays& arrays,
          const Runner& run, wire::Level level) {
  const Kernels& kernels = KernelsAt(level, type);
  float ratio = 1;
  if (switches.adapt) ratio = LarsRatio(rule, AddUp(arrays, type, run, kernels.lars_norms));
  if (switches.clip) ratio = Clipped(ratio, rule.learning_rate);
  const bool inside = switches.rate_inside;
  const LarsStep step = {rule.momentum, rule.weight_decay,
                         inside ? rule.learning_rate * ratio : ratio,
                         inside ? 1 : rule.learning_rate, switches.nesterov};
  Move(arrays, type, run, [&](const Arrays& block) { kernels.lars_update(step, block); });
}

}  // namespace optimizers
}  // namespace tfscale
