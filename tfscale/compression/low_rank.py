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
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Kept, Load, Method, Wire, joined, separated
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
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank is a number of columns, 1 or more; got {self.rank!r}")
        if self.saves < 0:
            raise ValueError(f"saves is a factor, 0 or more; got {self.saves!r}")
        checked(self.factors)
        checked(self.otherwise)

    @property
    def others(self) -> tuple[Method, ...]:  # type: ignore[override]
        return (Wire(self.otherwise),)

    @property
    def wires(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.factors,)

    @property
    def random(self) -> bool:  # type: ignore[override]
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
        kept = {_FACTOR: Kept((columns, rank), common=True, start=_Start(gradient.path))}
        return {RESIDUAL: Kept(gradient.shape), **kept} if self.feedback else kept

    def sums(self, load: Load) -> list[tf.Tensor]:
        """See the module."""
        matrices = [tf.reshape(g, [-1, g.shape[-1]]) for g in load.gradients]
        if self.feedback:
            residuals = load.kept(RESIDUAL)
            matrices = [m + tf.reshape(e, m.shape) for m, e in zip(matrices, residuals)]
        factors = load.kept(_FACTOR)
        products = [m @ q for m, q in zip(matrices, factors)]
        sums = separated(load.all_reduce(joined(products), self.factors, what="rows"), products)
        bases = [_orthonormal(total) for total in sums]
        own = [tf.matmul(m, p, transpose_a=True) for m, p in zip(matrices, bases)]
        flat = joined(own)
        # What the wire loses of a factor stays with the replica, as the rest of its matrix does.
        if self.feedback and not FORMATS[self.factors].lossless:
            total, lost = load.all_reduce(flat, self.factors, tf.zeros_like(flat), "columns")
            own = separated(flat - lost, own)
        else:
            total = load.all_reduce(flat, self.factors, what="columns")
        columns = separated(total, own)
        finite = tf.reduce_all(tf.math.is_finite(total))  # so are the bases, or these were not
        if self.feedback:
            rests = [m - _product(p, q) for m, p, q in zip(matrices, bases, own)]
            load.keep(
                RESIDUAL,
                [tf.where(finite, tf.reshape(m, e.shape), e) for m, e in zip(rests, residuals)],
            )
        load.keep(
            _FACTOR,
            [tf.where(finite, _scaled(q, old), old) for q, old in zip(columns, factors)],
        )
        return [
            tf.reshape(_product(p, q), g.shape) for p, q, g in zip(bases, columns, load.gradients)
        ]

    def __str__(self) -> str:
        return f"PowerSGD({self.rank})" + (" + feedback" if self.feedback else "")


@dataclasses.dataclass(frozen=True)
class _Start:
    """Random directions, the same on all replicas, others for each variable."""

    path: str

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(self.path.encode())).standard_normal(
            shape, np.float32
        )


def _product(p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
    return tf.matmul(p, q, transpose_b=True)


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
