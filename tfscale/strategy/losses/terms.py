r"""Terms of a loss, and the kind of each term, read from the graph.

The loss of a global batch is not always the mean of the replicas' losses. A loss
:math:`\sum_i c_i t_i` has terms :math:`t_i` of several kinds, and each replica holds a part of
each term:

========  ==============================================  ==================================
kind      what the term is                                weight of a replica's term
========  ==============================================  ==================================
scaled    divided by the number of replicas already,      1
          perhaps in a branch or a loop
fixed     independent of the batch, as a penalty on       the replica's share of the rows
          weights
sum       a sum over samples                              1, or 0 if the replica has no rows
mean      a mean over elements                            its elements / all elements
ratio     a sum or a mean, divided by another             its divisor / the whole divisor
stopped   a number without a gradient                     as its own terms are weighted
by rows   scaled, and then scaled back                    the replica's share of the rows
function  computed from such terms, as a root of a mean   see ``own_losses``
unseen    anything else, such as the largest loss         as ``own_losses`` says
========  ==============================================  ==================================

The coefficients :math:`c_i` are TensorFlow's gradients of the loss with respect to its terms: all
operations between a loss and its terms are linear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from tfscale.exchange import dataflow
from tfscale.strategy.losses.divisors import (
    DIVIDES,
    REDUCES,
    constant,
    is_count,
    is_of_replicas,
    is_same_everywhere,
    reduces_the_batch,
    varies,
)
from tfscale.strategy.losses.functions import Function, function_of, may_hold_sums
from tfscale.strategy.share import RESTORES, SCALES, marks_of
from tfscale.strategy.step import this_step

SCALED, FIXED, SUM, MEAN, RATIO, STOPPED, BY_ROWS, FUNCTION, UNSEEN = (
    *("scaled", "fixed", "sum", "mean", "ratio", "stopped", "by rows", "function", "unseen"),
)
_REDUCED = (SUM, MEAN)  # kinds of terms that have no axis of samples
_PARTS = (*_REDUCED, SCALED, RATIO, BY_ROWS)  # kinds of numbers whose parts replicas add up

_THROUGH = (
    *("Identity", "IdentityN", "Neg", "Cast", "Reshape", "Squeeze", "ExpandDims", "Pack"),
    *("CheckNumerics", "ConcatV2"),
)
_ADDS = ("AddV2", "Add", "Sub", "AddN")
_MOST = 200  # largest number of operations in which a quotient is looked for
_LINEAR = frozenset((*_THROUGH, *_ADDS, *DIVIDES, *REDUCES, "Mul", "StopGradient"))


class Fraction(NamedTuple):
    """A quotient, with the function that divides as its operation does where the divisor is 0."""

    dividend: tf.Tensor
    divisor: tf.Tensor
    divide: Callable[..., tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Term:
    """Term of a loss.

    Attributes:
        tensor: the term, before it is multiplied by its coefficient.
        kind: kind of the term, from the table in the module's docstring.
        elements: elements that a mean is computed of; None for other kinds.
        fraction: what a ratio is; None for other kinds.
        function: how a function is computed; None for other kinds.
        leaves: terms that a function is computed from.
    """

    tensor: tf.Tensor
    kind: str
    elements: tf.Tensor | None = None
    fraction: Fraction | None = None
    function: Function | None = None
    leaves: tuple[Term, ...] = ()


def terms_of(loss: tf.Tensor) -> list[Term]:
    """Return the terms of a loss that is traced in a step of a replica."""
    return _Reader(parts=_Reader()).read(loss)


class _Reader:
    """Reader of a graph, from a loss down to its terms; it reads each tensor once.

    Args:
        parts: reader of what functions are computed from; None if this reader knows no functions.
    """

    def __init__(self, parts: _Reader | None = None) -> None:
        self._known: dict[Any, list[Term]] = {}
        self._parts = parts

    def read(self, tensor: tf.Tensor) -> list[Term]:
        """Return a tensor's terms.

        This reads the summands first, without recursion: a chain may have hundreds of sums.
        """
        waiting = [tensor]
        while waiting:
            below = [x for x in self._below(waiting[-1]) if x.ref() not in self._known]
            waiting.extend(below)
            if not below:
                done = waiting.pop()
                if done.ref() not in self._known:
                    self._known[done.ref()] = self._read(done)
        return self._known[tensor.ref()]

    def _below(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        op = tensor.op
        if tensor.ref() in self._known or op.type not in _LINEAR or marks_of(op):
            return []
        varying = [x for x in op.inputs if x.dtype.is_floating and varies(x)]
        if op.type in DIVIDES:
            return varying[:1] if varies(op.inputs[0]) else []
        return varying if op.type != "Mul" or len(varying) == 1 else []

    def _read(self, tensor: tf.Tensor) -> list[Term]:
        op = tensor.op
        if not varies(tensor):
            return [Term(tensor, FIXED)]
        if marks_of(op):
            return [Term(tensor, SCALED)]
        if op.type in _THROUGH or op.type in _ADDS:
            sources = [op.inputs[tensor.value_index]] if op.type == "IdentityN" else op.inputs
            sources = [x for x in sources if x.dtype.is_floating or varies(x)]  # without axes
            if all(x.dtype.is_floating for x in sources):
                return self._all(sources)
            return [Term(tensor, SUM if op.type == "Cast" and is_count(*sources) else UNSEEN)]
        if op.type == "StopGradient":
            kinds = {term.kind for term in self.read(op.inputs[0])}
            is_number = tensor.shape.rank == 0 and not kinds & {UNSEEN, FUNCTION}
            return [Term(tensor, STOPPED)] if is_number else self._function(tensor)
        if op.type == "Mul":
            return self._product(tensor, *op.inputs)
        if op.type in DIVIDES:
            return self._quotient(tensor, *op.inputs)
        if op.type in REDUCES:
            return self._reduction(tensor)
        if op.type == "SelectV2":  # where(is_finite(loss), loss, 0)
            kinds = {term.kind for x in op.inputs[1:] if varies(x) for term in self.read(x)}
            (found,) = self._function(tensor)
            is_scaled = found.kind == UNSEEN and kinds == {SCALED}
            return [Term(tensor, SCALED)] if is_scaled else [found]
        is_of_another_graph = dataflow.called_graphs(op) or op.type == "Placeholder"
        if is_of_another_graph and this_step().is_scaled(tensor):
            return [Term(tensor, SCALED)]
        return self._function(tensor)

    def _function(self, tensor: tf.Tensor) -> list[Term]:
        """Return the term that is a function of other terms; an unseen one if it is none."""
        parts = self._parts
        function = None if parts is None else function_of(tensor, parts.is_part)
        if parts is None or function is None:
            return [Term(tensor, UNSEEN)]
        leaves = tuple(parts.read(x)[0] if varies(x) else Term(x, FIXED) for x in function.leaves)
        if any(x.kind in _REDUCED and may_hold_sums(x.tensor) for x in leaves):
            return [Term(tensor, UNSEEN)]
        return [Term(tensor, FUNCTION, function=function, leaves=leaves)]

    def is_part(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor is one term, of which each replica has a part."""
        found = self.read(tensor)
        return (
            len(found) == 1
            and found[0].tensor.ref() == tensor.ref()
            and found[0].kind in (_PARTS if tensor.shape.rank == 0 else _REDUCED)
            and tensor.shape.is_fully_defined()
        )

    def _all(self, tensors: Iterable[tf.Tensor]) -> list[Term]:
        found = {term.tensor.ref(): term for x in tensors for term in self.read(x)}
        return list(found.values())

    def _product(self, tensor: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> list[Term]:
        kinds = {kind for kind in map(_kind_of_factor, (x, y)) if kind}
        if kinds:
            return [Term(tensor, kinds.pop() if len(kinds) == 1 else UNSEEN)]
        for factor, other in ((x, y), (y, x)):
            if not varies(factor):
                return self._times(constant(factor), self.read(other))
        return self._function(tensor)

    def _quotient(self, tensor: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> list[Term]:
        kind = _kind_of_factor(y)
        if kind is not None:
            return [Term(tensor, kind)]
        if not varies(y):
            value = constant(y)
            return self._times(
                None if value is None or not value.all() else 1 / value, self.read(x)
            )
        kinds = {term.kind for term in self.read(x)}
        if is_same_everywhere(y):
            return self.read(x)
        if kinds <= {SUM, MEAN, FIXED, SCALED, STOPPED} and is_of_replicas(y):
            return [Term(tensor, RATIO, fraction=Fraction(x, y, _division(tensor.op)))]
        return self._function(tensor)

    def _reduction(self, tensor: tf.Tensor) -> list[Term]:
        x = tensor.op.inputs[0]
        inner = self.read(x)
        kinds = {term.kind for term in inner} - {FIXED}
        if UNSEEN not in kinds or x.shape.rank == 0:
            return inner  # the terms are inputs, and this adds them up
        if UNSEEN in kinds:  # a function may be added to the loss of each sample
            kinds -= {FUNCTION}
        if kinds != {UNSEEN} or not reduces_the_batch(tensor):
            return self._function(tensor)
        return [_sum(tensor) if tensor.op.type == "Sum" else Term(tensor, MEAN, x)]

    def _times(self, factor: Any, terms: list[Term]) -> list[Term]:
        """Return the terms multiplied by a constant factor.

        Sums that are divided by the constant number of this replica's rows become means.
        """
        return [_as_mean(term) for term in terms] if _divides_by_rows(factor) else terms


def _divides_by_rows(factor: Any) -> bool:
    """Return whether a constant is one over the number of this replica's rows."""
    rows = this_step().graph.static_rows
    if factor is None or rows is None or factor.size != 1:
        return False
    return abs(float(factor) * rows - 1) < 1e-6


def _sum(tensor: tf.Tensor) -> Term:
    r"""Return the term that is a sum over samples.

    It is a ratio if each element is divided by one number of the batch already, as weights are
    that add up to one: :math:`\sum_i x_i / d = (\sum_i x_i) / d`.
    """
    path = _path_to_quotient(tensor.op, {})
    if path is None:
        return Term(tensor, SUM)
    *between, quotient = path
    x, divisor = quotient.inputs
    if not varies(divisor):
        return Term(tensor, MEAN, tensor.op.inputs[0])
    before = quotient.outputs[0]
    for op in reversed(between):
        x, before = _again(op, before, x), op.outputs[0]
    return Term(tensor, RATIO, fraction=Fraction(x, divisor, _division(quotient)))


def _division(op: tf.Operation) -> Callable[..., tf.Tensor]:
    divide: Callable[..., tf.Tensor] = tf.divide
    return tf.math.divide_no_nan if op.type == "DivNoNan" else divide


def _path_to_quotient(op: tf.Operation, known: dict[Any, Any]) -> list[tf.Operation] | None:
    """Return the operations from a sum to the only quotient by a number of the batch in it."""
    if op not in known and len(known) < _MOST:
        known[op] = None  # until its inputs are known
        found: list[list[tf.Operation]] = []
        if op.type in DIVIDES and _is_number_of_batch(op.inputs[1]):
            found = [[]]
        elif op.type == "Mul" or op.type in _AGAIN:
            inputs = op.inputs if op.type == "Mul" else op.inputs[:1]
            found = [path for x in inputs if (path := _path_to_quotient(x.op, known))]
        known[op] = [op, *found[0]] if len(found) == 1 else None
    result: list[tf.Operation] | None = known.get(op)
    return result


def _is_number_of_batch(divisor: tf.Tensor) -> bool:
    if divisor.shape.rank != 0 and divisor.shape.num_elements() != 1:
        return False
    if varies(divisor):
        return not is_same_everywhere(divisor) and is_of_replicas(divisor)
    value = constant(divisor)
    return value is not None and bool(value.all()) and _divides_by_rows(1 / value)


# How to compute again what an operation computes, of another first input; tapes see it.
_AGAIN = {
    "Identity": lambda op, x: x,
    "Neg": lambda op, x: -x,
    "Cast": lambda op, x: tf.cast(x, op.outputs[0].dtype),
    "Reshape": lambda op, x: tf.reshape(x, op.inputs[1]),
    "ExpandDims": lambda op, x: tf.expand_dims(x, op.inputs[1]),
    "Squeeze": lambda op, x: tf.squeeze(x, op.get_attr("squeeze_dims")),
    "Sum": lambda op, x: tf.reduce_sum(x, op.inputs[1], op.get_attr("keep_dims")),
    "Mean": lambda op, x: tf.reduce_mean(x, op.inputs[1], op.get_attr("keep_dims")),
    **dict.fromkeys(DIVIDES, lambda op, x: _division(op)(x, op.inputs[1])),
}


def _again(op: tf.Operation, old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    """Return what an operation computes of another input in place of one of its inputs."""
    if op.type == "Mul":
        return tf.multiply(*(new if x.ref() == old.ref() else x for x in op.inputs))
    return _AGAIN[op.type](op, new)


def _as_mean(term: Term) -> Term:
    """Return a sum as a mean of the same elements; return other terms as they are."""
    if term.kind != SUM or term.tensor.op.type != "Sum":
        return term
    return Term(term.tensor, MEAN, term.tensor.op.inputs[0])


def _kind_of_factor(factor: tf.Tensor) -> str | None:
    """Return SCALED for a factor that is the replica's share, and BY_ROWS for its inverse.

    The factor may be multiplied by constants. Return None for other factors.
    """
    seen = 0
    while True:
        own = marks_of(factor.op)
        if own:
            seen |= own
            break
        varying = [x for x in factor.op.inputs if varies(x)]
        linear = ("Identity", "Cast", "Mul", "RealDiv", "Reciprocal", "Inv")
        if factor.op.type not in linear or len(varying) != 1:
            break
        (factor,) = varying
    return {SCALES: SCALED, RESTORES: BY_ROWS}.get(seen)
