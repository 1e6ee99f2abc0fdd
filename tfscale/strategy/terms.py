r"""What a loss is the sum of, and what each of its terms divides by; read from the graph.

The loss of a global batch is not always the mean of the replicas' losses. A loss
:math:`\sum_i c_i t_i` has terms :math:`t_i` of several kinds, and each replica holds a part of
each term:

========  ==============================================  ==================================
kind      what the term is                                weight of a replica's term
========  ==============================================  ==================================
scaled    divided by the number of replicas already       1
fixed     independent of the batch, as a penalty on       the replica's share of the rows
          weights
sum       a sum over samples                              1, or 0 if the replica has no rows
mean      a mean over elements                            its elements / all elements
ratio     a sum or a mean, divided by another             its divisor / the whole divisor
unseen    anything else, such as a root of a mean         as ``own_losses`` says
========  ==============================================  ==================================

The coefficients :math:`c_i` come from TensorFlow's gradients of the loss by its terms: between a
loss and its terms are linear operations only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfscale.strategy import share
from tfscale.strategy.share import BATCH, RESTORES, SCALES, bits_of

SCALED, FIXED, SUM, MEAN, RATIO, RESTORED, UNSEEN = (
    *("scaled", "fixed", "sum", "mean", "ratio", "restored", "unseen"),
)

_THROUGH = ("Identity", "IdentityN", "Neg", "Cast", "Reshape", "Squeeze", "ExpandDims", "Pack")
_ADDS = ("AddV2", "Add", "Sub", "AddN")
_DIVIDES = ("RealDiv", "DivNoNan", "Div")
_REDUCES = ("Sum", "Mean")
_KEEPS_DIVISOR = ("Cast", "Identity", "Reshape", "Squeeze", "ExpandDims")
_ADDS_UP = ("Sum", "Size", "Prod", "StridedSlice", "GatherV2")


@dataclasses.dataclass(frozen=True)
class Term:
    """A term of a loss.

    Attributes:
        tensor: the term, before it is multiplied by its coefficient.
        kind: see the module.
        below: of a ratio, what it divides by on this replica; of a mean, its elements.
    """

    tensor: tf.Tensor
    kind: str
    below: tf.Tensor | None = None


def terms_of(loss: tf.Tensor) -> list[Term]:
    """Return the terms of a loss that is traced in a step of a replica."""
    return _Reader().read(loss)


class _Reader:
    """Reads a graph from a loss down to its terms; each tensor once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Term]] = {}

    def read(self, tensor: tf.Tensor) -> list[Term]:
        key = tensor.ref()
        if key not in self._known:
            self._known[key] = self._read(tensor)
        return self._known[key]

    def _read(self, tensor: tf.Tensor) -> list[Term]:
        op = tensor.op
        if not _varies(tensor):
            return [Term(tensor, FIXED)]
        if share.marks_of(op):
            return [Term(tensor, SCALED)]
        if op.type in _THROUGH or op.type in _ADDS:
            sources = [op.inputs[tensor.value_index]] if op.type == "IdentityN" else op.inputs
            seen = all(x.dtype.is_floating for x in sources)
            return self._all(sources) if seen else [Term(tensor, UNSEEN)]
        if op.type == "StopGradient":
            return self._as_one(tensor, self.read(op.inputs[0]))
        if op.type == "Mul":
            return self._product(tensor, *op.inputs)
        if op.type in _DIVIDES:
            return self._quotient(tensor, *op.inputs)
        if op.type in _REDUCES:
            return self._reduction(tensor)
        return [Term(tensor, UNSEEN)]

    def _all(self, tensors: Iterable[tf.Tensor]) -> list[Term]:
        found = {term.tensor.ref(): term for x in tensors for term in self.read(x)}
        return list(found.values())

    def _as_one(self, tensor: tf.Tensor, terms: list[Term]) -> list[Term]:
        """A tensor whose gradient does not reach its terms is a term itself."""
        alike = {(one.kind, None if one.below is None else one.below.ref()) for one in terms}
        if len(alike) > 1:
            return [Term(tensor, UNSEEN)]
        return [dataclasses.replace(terms[0], tensor=tensor)]

    def _product(self, tensor: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> list[Term]:
        kinds = {kind for kind in map(_kind_of_factor, (x, y)) if kind}
        if kinds:
            return [Term(tensor, kinds.pop() if len(kinds) == 1 else UNSEEN)]
        for factor, other in ((x, y), (y, x)):
            if not _varies(factor):
                return self._times(tf.get_static_value(factor), self.read(other))
        return [Term(tensor, UNSEEN)]

    def _quotient(self, tensor: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> list[Term]:
        kind = _kind_of_factor(y)
        if kind is not None:
            return [Term(tensor, kind)]
        if not _varies(y):
            value = tf.get_static_value(y)
            return self._times(
                None if value is None or not value.all() else 1 / value, self.read(x)
            )
        kinds = {term.kind for term in self.read(x)}
        if (kinds == {SUM} and _adds_up(y)) or (kinds == {MEAN} and y.op.type == "Mean"):
            return [Term(tensor, RATIO, y)]
        return [Term(tensor, UNSEEN)]

    def _reduction(self, tensor: tf.Tensor) -> list[Term]:
        x = tensor.op.inputs[0]
        inner = self.read(x)
        kinds = {term.kind for term in inner} - {FIXED}
        if UNSEEN not in kinds or x.shape.rank == 0:
            return inner  # terms are below: this only adds them up
        if kinds != {UNSEEN} or not _reduces_the_batch(tensor):
            return [Term(tensor, UNSEEN)]
        if tensor.op.type == "Sum":
            return [Term(tensor, SUM)]
        return [Term(tensor, MEAN, x)]

    def _times(self, factor: Any, terms: list[Term]) -> list[Term]:
        """A sum that is divided by the constant number of this replica's rows is a mean."""
        rows = share.static_rows()
        if factor is None or rows is None or factor.size != 1 or [x.kind for x in terms] != [SUM]:
            return terms
        (term,) = terms
        if term.tensor.op.type == "Sum" and abs(float(factor) * rows - 1) < 1e-6:
            return [Term(term.tensor, MEAN, term.tensor.op.inputs[0])]
        return terms


def _varies(tensor: tf.Tensor) -> bool:
    """Whether a tensor depends on the batch, or on what this replica holds of it."""
    return bool(bits_of(tensor) & (BATCH | SCALES))


def _kind_of_factor(factor: tf.Tensor) -> str | None:
    """Whether a factor is the replica's share, or the inverse of it, times constants."""
    seen = 0
    while True:
        own = share.marks_of(factor.op)
        if own:
            seen |= own
            break
        varying = [x for x in factor.op.inputs if _varies(x)]
        linear = ("Identity", "Cast", "Mul", "RealDiv", "Reciprocal", "Inv")
        if factor.op.type not in linear or len(varying) != 1:
            break
        (factor,) = varying
    return {SCALES: SCALED, RESTORES: RESTORED}.get(seen)


def _reduces_the_batch(tensor: tf.Tensor) -> bool:
    """Whether a reduction takes together the samples of a batch, and not the numbers of each."""
    x, axes = tensor.op.inputs
    axes, rows = tf.get_static_value(axes), share.static_rows()
    if axes is None or x.shape.rank is None or not bits_of(x) & BATCH:
        return False
    reduced = {int(axis) % x.shape.rank for axis in axes.reshape([-1])}
    sizes = [x.shape[axis] for axis in (sorted(reduced) if len(reduced) == x.shape.rank else [0])]
    if len(reduced) < x.shape.rank and 0 not in reduced:
        return False
    if rows is None:
        return None in sizes
    return None in sizes or math.prod(sizes) % rows == 0


def _adds_up(divisor: tf.Tensor) -> bool:
    """Whether the divisor of the whole batch can be had from those of replicas."""
    op = divisor.op
    if op.type in _KEEPS_DIVISOR:
        return _adds_up(op.inputs[0])
    if op.type in ("Maximum", "AddV2", "Add", "Mul"):
        varying = [x for x in op.inputs if _varies(x)]
        return len(varying) == 1 and _adds_up(varying[0])
    return op.type in _ADDS_UP


def whole_divisor(divisor: tf.Tensor) -> tf.Tensor:
    """Return what a ratio divides by for the whole batch.

    Constants in it count once; what adds up is summed over replicas, and a mean is that of all.
    """
    op = divisor.op
    if op.type in _KEEPS_DIVISOR:
        return tf.cast(whole_divisor(op.inputs[0]), divisor.dtype)
    if op.type in ("Maximum", "AddV2", "Add", "Mul"):
        compute = {"Maximum": tf.maximum, "Mul": tf.multiply}.get(op.type, tf.add)
        x, y = (whole_divisor(v) if _varies(v) else v for v in op.inputs)
        return tf.cast(compute(x, y), divisor.dtype)
    if op.type == "Mean":
        divisor = divisor * share.of_elements(op.inputs[0]).weight(divisor.dtype)
    return share.summed(divisor)
