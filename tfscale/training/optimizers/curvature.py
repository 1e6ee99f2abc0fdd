"""Hutchinson's estimate of the Hessian's diagonal, from gradients that exist already.

``z^T g`` is differentiated once more. In a graph, all operations that led to the gradients still
exist; eagerly, a tape must have recorded them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.analysis.curvature.derivatives import REMEDY, UNKNOWN, again, dense, first_sentence
from tfscale.analysis.curvature.tracing import TracedGraphs
from tfscale.bridge.objects import native, path_of

# A function of outputs, their weights, and variables: for each variable a gradient or None.
Differentiate = Callable[[list[Any], list[Any], list[Any]], list[Any]]

_UNKNOWN = (
    "AdaHessian needs second derivatives, and TensorFlow cannot differentiate the gradient of %s: "
    f"%s. {REMEDY}, or use another optimizer."
)

_FOREIGN = (
    "AdaHessian needs second derivatives, and cannot see how the gradient of %s was computed. In "
    "a graph, compute gradients and call apply_gradients within the same tf.function. Eagerly, do "
    "both within `with optimizer.recording():`."
)

_CONSTANT = (
    "AdaHessian needs second derivatives, and the gradients of %s depend on no variable. Either "
    "they were computed elsewhere: do that and call apply_gradients within the same tf.function, "
    "or, eagerly, within `with optimizer.recording():`. Or the loss is linear in all variables: "
    "then use another optimizer."
)


def diagonal(
    differentiate: Differentiate,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    signs: Callable[[int, int], tf.Tensor],
    samples: int,
    size: Any = 1.0,
) -> list[tf.Tensor]:
    """Return the mean over samples of ``z * (H z)``, in each variable's shape.

    Args:
        differentiate: ``in_graph``, or ``on_tape``.
        gradients: dense or ``IndexedSlices``, none of them None.
        variables: the variables of the gradients.
        signs: makes ``z`` from the index of a variable and the index of a sample.
        samples: number of samples.
        size: factor of ``z`` in the products, which are divided by it, to keep half-precision
            numbers within their range.
    """
    ys = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    sums: list[Any] = [None] * len(ys)
    for sample in range(samples):
        zs = [signs(i, sample) for i in range(len(ys))]
        weights = [_at_rows(g, _times(size, z)) for g, z in zip(gradients, zs)]
        products = _products(differentiate, ys, weights, list(variables))
        for i, (z, hz) in enumerate(zip(zs, products, strict=True)):
            if hz is not None:
                hz = dense(hz, variables[i])
                sums[i] = hz * z if sums[i] is None else sums[i] + hz * z
    # None means that no path leads from a variable to any gradient: the derivatives are zero.
    return [
        tf.zeros(v.shape, y.dtype) if total is None else _times(1 / (samples * size), total)
        for total, v, y in zip(sums, variables, ys, strict=True)
    ]


def _times(factor: Any, x: tf.Tensor) -> tf.Tensor:
    return x if isinstance(factor, float) and factor == 1 else x * tf.cast(factor, x.dtype)


def _at_rows(gradient: Any, z: tf.Tensor) -> tf.Tensor:
    """Return a gradient's weights; a row that occurs twice has the weight of its sum."""
    return tf.gather(z, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else z


def _products(
    differentiate: Differentiate, ys: list[Any], weights: list[Any], variables: list[Any]
) -> list[Any]:
    try:
        products = differentiate(ys, weights, variables)
    except UNKNOWN as error:
        path = _last_without(differentiate, ys, weights, variables)
        raise NotImplementedError(_UNKNOWN % (path, first_sentence(error))) from error
    if products and all(hz is None for hz in products):
        raise ValueError(_CONSTANT % ", ".join(path_of(v) for v in variables[:3]))
    return products


def _last_without(
    differentiate: Differentiate, ys: list[Any], weights: list[Any], variables: list[Any]
) -> str:
    """Return the path of the last variable whose gradient has no derivative."""
    for y, weight, variable in reversed(list(zip(ys, weights, variables, strict=True))):
        try:
            differentiate([y], [weight], variables)
        except UNKNOWN:
            return path_of(variable)
    return "all variables together"


def on_tape(
    tape: tf.GradientTape, ys: list[Any], weights: list[Any], variables: list[Any]
) -> list[Any]:
    """Differentiate what a persistent tape has recorded."""
    return list(tape.gradient(ys, [native(v) for v in variables], weights))


def in_graph(ys: list[Any], weights: list[Any], variables: list[Any]) -> list[Any]:
    """Differentiate in the graph that is being traced, or in outer graphs.

    Keras applies gradients within ``tf.cond`` if it scales the loss. There gradients come from
    outside, where variables have other names. So the derivatives by all names are summed.
    """
    graphs = TracedGraphs()
    for y, variable in zip(ys, variables, strict=False):
        if not graphs.is_made_here(y):
            raise ValueError(_FOREIGN % path_of(variable))
    names = graphs.names([native(v).handle for v in variables])
    found = iter(again(ys, [name for several in names for name in several], weights))
    parts = [[next(found) for _ in several] for several in names]
    return [_sum(several, v) for several, v in zip(parts, variables, strict=True)]


def _sum(parts: list[Any], variable: Any) -> Any:
    summands = [dense(part, variable) for part in parts if part is not None]
    return tf.add_n(summands) if summands else None
