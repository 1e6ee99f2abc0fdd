r"""PowerSGD: approximation of gradient matrices by products of two thin matrices.

Each training step makes one step of subspace iteration: with the replicas' gradients :math:`M_i =
G_i + E_i` (n x m) and a thin matrix :math:`Q` (m x r) of the step before,

.. math:: P = \mathrm{orth}(\sum_i M_i Q), \quad Q_i' = M_i^T P, \quad
          S = P (\sum_i Q_i')^T, \quad E_i' = M_i - P Q_i'^T

Two all-reduces of r (n + m) numbers in all replace one of n m. Nothing is lost, only delayed:
:math:`\sum_i M_i = S + \sum_i E_i'`, whatever P is. From step to step Q turns to the sum's r
leading directions, which is why the method works at ranks as small as 1.

Reference: Vogels, Karimireddy, Jaggi: PowerSGD (NeurIPS 2019), arXiv 1905.13727.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfscale.collectives.wires import FORMATS, LOSSLESS, checked
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Kept, Load, Method, Wire, joined, separated
from tfscale.native import compression as ops
from tfscale.support import arguments

_FACTOR = "factor"


@dataclasses.dataclass(frozen=True)
class PowerSGD(Method):
    """Sums of low rank, with error feedback.

    A kernel of more than two dimensions counts as a matrix with a column for each entry of its last
    dimension: a convolution's output channels.

    Args:
        rank: rank of the sum; less if the matrix has fewer rows or columns.
        feedback: whether the part that is not sent is added to the gradients of the next step.
            Without feedback, a training loses the part outside the r directions.
        factors: the wire of the two thin matrices: ``"fp32"``, ``"bf16"``, ``"fp16"`` or any other.
        otherwise: the wire of vectors, and of matrices that are too small to benefit.
        saves: smallest ratio of the matrix's numbers to the factors' numbers.

    Example:
        >>> strategy = tfscale.ScaleStrategy(method={"kernel$": PowerSGD(rank=4)})
    """

    rank: int = 4
    feedback: bool = True
    factors: str = LOSSLESS
    otherwise: str = LOSSLESS
    saves: float = 2.0

    def __post_init__(self) -> None:
        arguments.whole(self.rank, "rank", 1, what="a number of columns")
        arguments.flag(self.feedback, "feedback")
        arguments.real(self.saves, "saves", 0, what="a factor")
        checked(self.factors, "factors")
        checked(self.otherwise, "otherwise")

    @property
    def others(self) -> tuple[Method, ...]:  # type: ignore[override]
        """The wire of vectors and of small matrices."""
        return (Wire(self.otherwise),)

    @property
    def wires(self) -> tuple[str, ...]:  # type: ignore[override]
        """The wire of the factors."""
        return (self.factors,)

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Whether the factors' wire rounds at random."""
        return FORMATS[self.factors].rounds_at_random(with_residual=False)

    def suited(self, gradient: Gradient) -> Method:
        """Return this method, or a wire for gradients that are not matrices or are too small."""
        if len(gradient.shape) < 2 or not gradient.elements:
            return self.others[0]
        rows, columns, rank = self._sizes(gradient.shape)
        worth = rank * (rows + columns) * self.saves <= gradient.elements
        return self if worth else self.others[0]

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return rows, columns, min(self.rank, rows, columns)

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """Return the residual, and the factor that the next step begins with."""
        _, columns, rank = self._sizes(gradient.shape)
        kept = {_FACTOR: Kept((rank, columns), common=True, start=_directions)}
        return {RESIDUAL: Kept(gradient.shape), **kept} if self.feedback else kept

    def sums(self, load: Load) -> list[tf.Tensor]:
        """Sum by a step of subspace iteration: see the module."""
        passes = _Fused(load) if self.feedback and load.on_cpu else _Plain(load, self.feedback)
        factors = load.kept(_FACTOR)
        products = [passes.rows(i, factor) for i, factor in enumerate(factors)]
        sums = separated(load.all_reduce(joined(products), self.factors, what="rows"), products)
        bases = [_orthonormal(total) for total in sums]
        own = [passes.columns(i, basis) for i, basis in enumerate(bases)]
        flat = joined(own)
        if self.feedback and not FORMATS[self.factors].lossless:
            # The replica keeps the wire's rounding error of a factor in its matrix's residual.
            total, lost = load.all_reduce(flat, self.factors, tf.zeros_like(flat), "columns")
            own = separated(flat - lost, own)
        else:
            total = load.all_reduce(flat, self.factors, what="columns")
        totals = separated(total, own)
        # if the total is finite, the bases are, too
        finite = tf.reduce_all(tf.math.is_finite(total))
        found = [passes.sum(i, *each, finite) for i, each in enumerate(zip(bases, own, totals))]
        nexts = [tf.where(finite, _scaled(q, old), old) for q, old in zip(totals, factors)]
        load.keep(_FACTOR, nexts)
        return [tf.reshape(total, g.shape) for total, g in zip(found, load.gradients)]

    def __str__(self) -> str:
        return f"PowerSGD({self.rank})" + (" + feedback" if self.feedback else "")


class _Plain:
    """The passes over a bucket's matrices as TensorFlow operations."""

    def __init__(self, load: Load, feedback: bool) -> None:
        self._load, self._feedback = load, feedback
        self._matrices = [_matrix(g) for g in load.gradients]
        self._old = load.kept(RESIDUAL) if feedback else []
        for i, rest in enumerate(self._old):
            self._matrices[i] += _matrix(rest)

    def rows(self, i: int, factor: tf.Tensor) -> tf.Tensor:
        """Return the components of each row of the i-th matrix along the factor's rows."""
        return tf.matmul(self._matrices[i], factor, transpose_b=True)

    def columns(self, i: int, basis: tf.Tensor) -> tf.Tensor:
        """Return the components of each column of the i-th matrix along the basis."""
        return tf.matmul(basis, self._matrices[i], transpose_a=True)

    def sum(
        self, i: int, basis: tf.Tensor, own: tf.Tensor, total: tf.Tensor, finite: tf.Tensor
    ) -> tf.Tensor:
        """Return the sum of the i-th matrix; keep this replica's residual, if the sum is finite."""
        if self._feedback:
            old = self._old[i]
            rest = tf.reshape(self._matrices[i] - basis @ own, tf.shape(old))
            self._load.variables(RESIDUAL)[i].assign(tf.where(finite, rest, old))
        return basis @ total


class _Fused:
    """The passes in C++, for CPUs, with feedback: three passes, which make only the sum."""

    def __init__(self, load: Load) -> None:
        self._matrices = [_matrix(g) for g in load.gradients]
        self._rests = load.variables(RESIDUAL)

    def rows(self, i: int, factor: tf.Tensor) -> tf.Tensor:
        return ops.low_rank_rows(self._matrices[i], factor, self._rests[i])

    def columns(self, i: int, basis: tf.Tensor) -> tf.Tensor:
        return ops.low_rank_columns(self._matrices[i], basis, self._rests[i])

    def sum(
        self, i: int, basis: tf.Tensor, own: tf.Tensor, total: tf.Tensor, finite: tf.Tensor
    ) -> tf.Tensor:
        return ops.low_rank_sum(self._matrices[i], basis, own, total, finite, self._rests[i])


def _matrix(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [-1, x.shape[-1]])


def _directions(shape: tuple[int, ...]) -> np.ndarray:
    """Return random directions from a fixed seed, since layers' names change in notebooks."""
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def _orthonormal(x: tf.Tensor) -> tf.Tensor:
    """Return an orthonormal basis by Householder's reflections.

    They are stable for columns that are nearly parallel, or zero.
    """
    finite = tf.reduce_all(tf.math.is_finite(x))
    scale = tf.reduce_max(tf.abs(x))  # the scale keeps squares from over- or underflow
    basis, _ = tf.linalg.qr(tf.math.divide_no_nan(tf.where(finite, x, 0.0), scale))
    return tf.where(finite, basis, float("nan"))


def _scaled(factor: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Scale a factor, whose directions alone count; keep the old one if it is zero."""
    scale = tf.reduce_max(tf.abs(factor))
    return tf.where(scale > 0, tf.math.divide_no_nan(factor, scale), old)
