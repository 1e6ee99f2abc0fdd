r"""PowerSGD: gradients of matrices as products of two thin ones.

One step of subspace iteration per training step: with the replicas' gradients
:math:`M_i = G_i + E_i` (n x m) and a thin matrix :math:`Q` (m x r) of the step before,

.. math:: P = \mathrm{orth}\Big(\sum_i M_i Q\Big), \quad Q_i' = M_i^T P, \quad
          S = P \Big(\sum_i Q_i'\Big)^T, \quad E_i' = M_i - P Q_i'^T

Two all-reduces of r (n + m) numbers stand in for one of n m. Nothing is lost, only late:
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

from tfscale import arguments
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Kept, Load, Method, Wire, joined, separated
from tfscale.ops import compression as ops
from tfscale.wires import FORMATS, LOSSLESS, checked

_FACTOR = "factor"


@dataclasses.dataclass(frozen=True)
class PowerSGD(Method):
    """Sums of low rank, with error feedback.

    A kernel of more than two dimensions counts as a matrix of as many columns as its last
    dimension has: a convolution's output channels.

    Args:
        rank: of the sum; less where the matrix has fewer rows or columns.
        feedback: whether what is not sent is added to the gradients of the next step. Without
            it a training loses what lies outside the r directions.
        factors: the wire of the two thin matrices: ``"fp32"``, ``"bf16"``, ``"fp16"`` or any other.
        otherwise: the wire of vectors, and of matrices that are too small to be worth it.
        saves: how many times fewer numbers than the matrix the factors must have.

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
        """Itself, or a wire for what is no matrix or is too small."""
        if len(gradient.shape) < 2 or not gradient.elements:
            return self.others[0]
        rows, columns, rank = self._sizes(gradient.shape)
        worth = rank * (rows + columns) * self.saves <= gradient.elements
        return self if worth else self.others[0]

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return rows, columns, min(self.rank, rows, columns)

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """The residual, and the factor that the next step begins with."""
        _, columns, rank = self._sizes(gradient.shape)
        kept = {_FACTOR: Kept((rank, columns), common=True, start=_directions)}
        return {RESIDUAL: Kept(gradient.shape), **kept} if self.feedback else kept

    def sums(self, load: Load) -> list[tf.Tensor]:
        """See the module."""
        passes = _Fused(load) if self.feedback and load.on_cpu else _Plain(load, self.feedback)
        factors = load.kept(_FACTOR)
        products = [passes.rows(i, factor) for i, factor in enumerate(factors)]
        sums = separated(load.all_reduce(joined(products), self.factors, what="rows"), products)
        bases = [_orthonormal(total) for total in sums]
        own = [passes.columns(i, basis) for i, basis in enumerate(bases)]
        flat = joined(own)
        if self.feedback and not FORMATS[self.factors].lossless:
            # What the wire loses of a factor stays with the replica, as the rest of its matrix.
            total, lost = load.all_reduce(flat, self.factors, tf.zeros_like(flat), "columns")
            own = separated(flat - lost, own)
        else:
            total = load.all_reduce(flat, self.factors, what="columns")
        totals = separated(total, own)
        finite = tf.reduce_all(tf.math.is_finite(total))  # so are the bases, or these were not
        found = [passes.sum(i, *each, finite) for i, each in enumerate(zip(bases, own, totals))]
        nexts = [tf.where(finite, _scaled(q, old), old) for q, old in zip(totals, factors)]
        load.keep(_FACTOR, nexts)
        return [tf.reshape(total, g.shape) for total, g in zip(found, load.gradients)]

    def __str__(self) -> str:
        return f"PowerSGD({self.rank})" + (" + feedback" if self.feedback else "")


class _Plain:
    """The passes over a bucket's matrices as TensorFlow's operations."""

    def __init__(self, load: Load, feedback: bool) -> None:
        self._load, self._feedback = load, feedback
        self._matrices = [_matrix(g) for g in load.gradients]
        self._old = load.kept(RESIDUAL) if feedback else []
        for i, rest in enumerate(self._old):
            self._matrices[i] += _matrix(rest)

    def rows(self, i: int, factor: tf.Tensor) -> tf.Tensor:
        """Of each row of the i-th matrix, its part in the directions of the factor's rows."""
        return tf.matmul(self._matrices[i], factor, transpose_b=True)

    def columns(self, i: int, basis: tf.Tensor) -> tf.Tensor:
        """Of each column of the i-th matrix, its part in the directions of the basis."""
        return tf.matmul(basis, self._matrices[i], transpose_a=True)

    def sum(
        self, i: int, basis: tf.Tensor, own: tf.Tensor, total: tf.Tensor, finite: tf.Tensor
    ) -> tf.Tensor:
        """The sum of the i-th matrix; what this replica did not send is kept, if finite."""
        if self._feedback:
            old = self._old[i]
            rest = tf.reshape(self._matrices[i] - basis @ own, tf.shape(old))
            self._load.variables(RESIDUAL)[i].assign(tf.where(finite, rest, old))
        return basis @ total


class _Fused:
    """The same in C++, for CPUs, with feedback: three passes, and no matrix is made but the sum."""

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
    """At random, and always the same: layers have other names in each run of a notebook's cell."""
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def _orthonormal(x: tf.Tensor) -> tf.Tensor:
    """By Householder's reflections: stable for columns that are nearly parallel, or zero."""
    finite = tf.reduce_all(tf.math.is_finite(x))
    scale = tf.reduce_max(tf.abs(x))  # for squares would over- or underflow
    basis, _ = tf.linalg.qr(tf.math.divide_no_nan(tf.where(finite, x, 0.0), scale))
    return tf.where(finite, basis, float("nan"))


def _scaled(factor: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Only its directions count, and none is lost where all gradients are zero."""
    scale = tf.reduce_max(tf.abs(factor))
    return tf.where(scale > 0, tf.math.divide_no_nan(factor, scale), old)
