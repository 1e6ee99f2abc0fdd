r"""Losses that users compute themselves, and the numbers that are logged from them.

Gradients are summed over replicas. So a replica's loss must be its part of the loss of the whole
batch. Keras's loss objects compute such parts, and so does a division by ``num_replicas_in_sync``:
such a term of a loss is *scaled*. A term that a ``train_step``, a ``compute_loss`` or ``add_loss``
computes by itself, with ``tf.reduce_mean(...)`` for example, is not scaled. terms.py reads the
divisor of the term from the graph, and this module weights the term by it.
``ScaleStrategy(own_losses=...)`` says what a loss is if the graph does not show it:

- ``"mean"``: a mean over the replica's samples. The loss is weighted by the replica's share.
- ``"sum"``: a sum over samples. The losses of replicas add up as they are.
- ``"scaled"``: a loss that is divided by the size of the global batch already. The losses of
  replicas add up as they are.
- None: the loss is treated as a mean, and a warning names the operation.

Eager steps have no graph to read: a whole loss is then either scaled, or what ``own_losses`` says.

Weighting a gradient instead of its loss is too late if replicas sum within the forward pass, as
synchronized batch normalization does: a replica's gradient then holds parts of all replicas'
losses. ``summed_backwards`` weights these parts.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.bridge.calls import is_for_each_row
from tfscale.bridge.losses import name_of_called
from tfscale.bridge.objects import is_variable
from tfscale.bridge.protocols import Model
from tfscale.exchange import dataflow
from tfscale.exchange.rows import with_numbers
from tfscale.strategy import inexact
from tfscale.strategy.losses.divisors import whole_divisor
from tfscale.strategy.losses.terms import (
    BY_ROWS,
    FIXED,
    FUNCTION,
    MEAN,
    RATIO,
    SCALED,
    STOPPED,
    SUM,
    UNSEEN,
    Term,
    terms_of,
)
from tfscale.strategy.share import SCALES, Share, as_scaled
from tfscale.strategy.step import this_step

_OF_ROWS = (
    "a tape in a loop of TensorFlow, in tf.vectorized_map or in a jacobian computes gradients of "
    "single rows, and with shard='all' the backward pass sums gradients over replicas. Take "
    "shard='optimizer', or let one tape differentiate the loss of all rows"
)

CHOICES = ("mean", "sum", "scaled")

_warned: set[str] = set()


def scaled_loss(loss: Any, since: int = 0, sums: bool = False) -> Any:
    """Return a replica's loss as its part of the whole batch's loss.

    Args:
        loss: loss of this replica's samples.
        since: how often the step had read its share before the loss was made.
        sums: whether an eager loss, whose terms cannot be read, is known to be a sum.
    """
    if _is_traced(loss):
        return _as_part(loss)
    if this_step().is_scaled(loss, since):
        return loss
    return loss * (_share().present(loss.dtype) if sums else _weight(loss.dtype))


def number_of_all(value: Any) -> Any:
    """Return a number that a replica has computed as its part of the whole batch's number."""
    if _is_traced(value):
        found = [_seen(term) for term in terms_of(value)]
        return _part(value, found, "mean" if _choice() == "mean" else None)
    return value if this_step().is_scaled(value) else value * _share().weight(value.dtype)


def is_part(value: Any) -> bool:
    """Return whether a value is a traced number that this replica's part of a loss has given."""
    step = this_step()
    if step.share is None or not _is_traced(value) or value.shape.rank != 0:
        return False
    if not step.graph.depends_on(SCALES, value):
        return False
    # Nobody knows of a branch whether it gives a part, or a number that all replicas have.
    return not any(dataflow.called_graphs(term.tensor.op) for term in terms_of(value))


def whole_number(value: tf.Tensor) -> tf.Tensor:
    """Return the number of the whole batch in place of one that a replica has computed."""
    (total,) = this_step().sum_over_rows([number_of_all(value)])
    return tf.cast(total, value.dtype)


def one_loss_for_all(loss: Any) -> Any:
    """Return the replica's part of a loss object's loss that is one number for all samples."""
    if not _is_traced(loss):
        inexact.warn_of_a_number(name_of_called())
        return loss * _share().part(loss.dtype)
    found = terms_of(loss)
    if UNSEEN in {term.kind for term in found}:
        inexact.warn_of_a_number(name_of_called())
    return _part(loss, [_seen(term) for term in found], None)


def part_of_mean(compute: Callable[[], Any]) -> Any:
    """Return the mean that ``compute`` gives, over this replica's rows, as its part of the batch's.

    A loss that is scaled already stays as it is, and so does one of a step that adds up no losses.
    """
    if this_step().share is None:
        return compute()
    since = _share().reads
    loss = tf.convert_to_tensor(compute())
    return loss if this_step().is_scaled(loss, since) else loss * _share().part(loss.dtype)


def target_of_gradients(target: Any, sources: Any) -> Any:
    """Return the target that a tape must differentiate in place of ``target``.

    If all terms have the same weight, ``scaled_gradients`` applies the weight later: the share of
    the rows, or what ``own_losses`` says. The gradient may never reach an optimizer, since the
    inner steps of meta-learning belong to each replica alone. If ``sources`` are not variables
    only, as for adversarial samples, nobody applies a weight to their gradients later.
    """
    if not all(map(_is_traced, tf.nest.flatten(target))):
        return target
    if not all(is_variable(v) for v in tf.nest.flatten(sources)):
        return tf.nest.map_structure(_as_part, target)
    return tf.nest.map_structure(_as_target, _one_of(target))


def _one_of(target: Any) -> Any:
    """Return one target that has the gradient of all: TensorFlow adds up those of several."""
    several = tf.nest.flatten(target)
    if len(several) < 2:
        return target
    return tf.add_n([tf.cast(tf.reduce_sum(x), several[0].dtype) for x in several])


def target_of_team(size: int, target: Any, sources: Any, is_inner: bool) -> Any:
    """Return a target of which each replica of a model team differentiates an equal part.

    Args:
        size: number of replicas of the team; all of them have computed the whole target.
        target: what a tape of the user is to differentiate.
        sources: sources of the gradient. A gradient by variables may reach an optimizer, which
            weights an eager one.
        is_inner: whether another tape records the gradient.
    """
    may_update = not is_inner and any(is_variable(v) for v in tf.nest.flatten(sources))

    def part(x: Any) -> Any:
        if this_step().share is None:  # predictions have no loss
            return x / size
        if not _is_traced(x):
            return x if may_update or this_step().is_scaled(x) else x / size
        return _part_of_team(x, size) if is_inner else _as_part(x)

    return tf.nest.map_structure(part, target)


def _part_of_team(target: tf.Tensor, size: int) -> tf.Tensor:
    """Return a target whose terms are divided by a team's size, but for those scaled already."""
    found = terms_of(tf.reduce_sum(target))
    are_scaled = {term.kind == SCALED for term in found if term.kind != STOPPED}
    if len(are_scaled) < 2:
        return target if True in are_scaled else target / size
    total = tf.zeros([], target.dtype)
    for term, slope in zip(found, _slopes(target, found), strict=True):
        part = tf.reduce_sum(slope * term.tensor)
        total += tf.cast(part if term.kind == SCALED else part / size, total.dtype)
    return total


def scaled_gradients(gradients: list[Any]) -> list[Any]:
    """Scale the gradients whose losses are not scaled yet; None stays None.

    A scaled loss may contain sums that are not scaled: a replica without rows adds 0 to them.
    """
    step, given = this_step(), [g for g in gradients if g is not None]
    if tf.executing_eagerly() and _share().reads and _choice() is None:
        _warn_of_eager_steps(step.model)
    scaled = zip(given, step.are_scaled(given), strict=True)
    done = iter([step.counted(g) if is_ else _weighted(g) for g, is_ in scaled])
    return [None if g is None else next(done) for g in gradients]


def logged(result: Any, of_metrics: set[int]) -> Any:
    """Replace the numbers in a step's result by those of the whole batch.

    Args:
        result: result of the step.
        of_metrics: ids of the results of metrics in ``result``, which are not parts of a sum.
    """
    values = tf.nest.flatten(result)
    numbers = [i for i, value in enumerate(values) if _is_number(value)]
    if not numbers:
        return result
    parts = [_part_of_number(values[i], id(values[i]) in of_metrics) for i in numbers]
    totals = tf.distribute.get_replica_context().all_reduce("SUM", parts)
    for i, total in zip(numbers, totals, strict=True):
        total = total if values[i].dtype.is_floating else tf.round(total)
        values[i] = tf.cast(total, values[i].dtype)
    return tf.nest.pack_sequence_as(result, values)


def _part_of_number(value: tf.Tensor, is_of_metric: bool) -> tf.Tensor:
    value = value if value.dtype.is_floating else tf.cast(value, tf.float64)
    return value * _share().weight(value.dtype) if is_of_metric else number_of_all(value)


def summed_backwards(sums: Callable[[list[Any]], list[Any]], gradients: list[Any]) -> list[Any]:
    """Return the gradients of a sum over replicas in their forward passes.

    Each replica multiplies its gradient by its weight before the sum, and divides the total by its
    weight. The weight is applied to the whole gradient of the replica later. A replica without
    rows sends and gets zeros.
    """
    step = this_step()
    late = [step.is_own and not step.is_scaled(g) for g in gradients]
    given = [
        g * _unseen_weight(g.dtype) if is_late else step.counted(g)
        for g, is_late in zip(gradients, late, strict=True)
    ]
    return [
        tf.math.divide_no_nan(g, _unseen_weight(g.dtype)) if is_late else step.counted(g)
        for g, is_late in zip(sums(given), late, strict=True)
    ]


# ------------------------------------------------------------------------ terms


def _is_traced(value: Any) -> bool:
    """Return whether a number's terms can be read: it belongs to the graph that is being made."""
    if tf.executing_eagerly() or not isinstance(value, tf.Tensor):
        return False
    return bool(value.dtype.is_floating) and value.graph is tf.compat.v1.get_default_graph()


def _seen(term: Term) -> Term:
    """Return a term; an unseen term is weighted by rows, without a warning."""
    return dataclasses.replace(term, kind=BY_ROWS) if term.kind == UNSEEN else term


def _as_part(target: tf.Tensor) -> tf.Tensor:
    total = tf.reduce_sum(target)
    return _part(total, terms_of(total), _choice())


def _as_target(loss: tf.Tensor) -> tf.Tensor:
    if this_step().sums_in_backward_pass and is_for_each_row():
        raise ValueError(_OF_ROWS)
    total, choice = tf.reduce_sum(loss), _choice()
    found, this_step().losses.are_read = terms_of(total), True
    kinds = {term.kind for term in found} - {STOPPED}
    if kinds <= {SCALED}:
        return loss
    # The step gets whole gradients at once, and may clip them before an optimizer gets them.
    if _share().is_same_on_all:
        return _part(total, found, choice)
    if choice in ("sum", "scaled") and kinds <= {MEAN, SUM, UNSEEN}:
        return loss
    # A batch that depends on scaled losses (adversarial samples) makes all gradients look scaled.
    # A sum of gradients in the backward pass, as of weights in parts, must not wait for weights.
    can_wait = not this_step().is_scaled(total) and not this_step().sums_in_backward_pass
    if can_wait and kinds <= ({MEAN, UNSEEN} if choice is None else {MEAN, SUM, UNSEEN}):
        return _relative_to_rows(loss, total, found)
    return _part(total, found, choice)


def _relative_to_rows(loss: tf.Tensor, total: tf.Tensor, found: list[Term]) -> tf.Tensor:
    """Return a loss whose terms are all means, except for the factor of the replica's row share.

    ``scaled_gradients`` multiplies the gradient by the row share, if the gradient reaches an
    optimizer. So a mean over other elements than rows is multiplied here by the ratio of its own
    share to the row share.
    """
    if _choice() is None:
        for term in found:
            if term.kind == UNSEEN:
                _warn(this_step().model, term.tensor)
    shares = [
        this_step().share_of_elements(t.elements) if t.kind == MEAN else _share() for t in found
    ]
    if all(one is _share() for one in shares):
        return loss
    relative = tf.zeros([], total.dtype)
    for term, own, slope in zip(found, shares, _slopes(total, found), strict=True):
        dtype = term.tensor.dtype
        weight = tf.math.divide_no_nan(own.weight(dtype), _share().weight(dtype))
        relative += tf.cast(tf.reduce_sum(slope * _times(term.tensor, weight)), total.dtype)
    return relative


def _part(value: tf.Tensor, found: list[Term], choice: str | None) -> tf.Tensor:
    """Return a number's part on this replica."""
    if {term.kind for term in found} == {SCALED}:
        return value
    return as_scaled(_sum_of_parts(value, found, choice))


def _sum_of_parts(
    value: tf.Tensor, found: list[Term], choice: str | None, times: tf.Tensor | None = None
) -> tf.Tensor:
    """Add up this replica's parts of the terms of ``value``, each multiplied by its coefficient.

    Args:
        value: a number, or several numbers that are added up.
        found: terms of ``value``.
        choice: the user's argument ``own_losses``.
        times: factors of the numbers in ``value``.
    """
    whole = not {term.kind for term in found} & {SCALED, BY_ROWS}
    total = tf.zeros([], value.dtype)
    for term, slope in zip(found, _slopes(value, found, times), strict=True):
        if term.kind == RATIO:
            part = _part_of_ratio(term, slope)
        else:
            part = _part_of_term(term, choice, whole)
            part = tf.reduce_sum(tf.cast(slope, part.dtype) * part)
        total += tf.cast(part, value.dtype)
    return total


def _slopes(value: tf.Tensor, found: list[Term], times: tf.Tensor | None = None) -> list[Any]:
    """Return the coefficients of terms.

    If a term is also an input of another term, its coefficient leaves out the path through that
    other term.
    """
    terms = [term.tensor for term in found]
    slopes: list[Any] = tf.gradients(value, terms, grad_ys=times, stop_gradients=terms)
    return slopes


def _part_of_term(term: Term, choice: str | None, whole: bool) -> tf.Tensor:
    """Return this replica's part of a term that is not a ratio.

    Args:
        term: term of a loss.
        choice: the user's argument ``own_losses``.
        whole: whether the user computes all of the loss, so that ``choice`` holds for each term.
    """
    rows, dtype = _share(), term.tensor.dtype
    if term.kind == SCALED:
        return term.tensor
    if term.kind == FUNCTION:
        return _part_of_function(term, choice, whole)
    if term.kind == STOPPED:
        (value,) = term.tensor.op.inputs
        return tf.stop_gradient(_part(value, terms_of(value), choice))
    if choice == "scaled" or (choice == "sum" and whole and term.kind != FIXED):
        return _times(term.tensor, rows.present(dtype))
    if term.kind == SUM:
        by_rows = choice == "mean" and whole
        return _times(term.tensor, rows.part(dtype) if by_rows else rows.present(dtype))
    if term.kind == MEAN:
        return _times(term.tensor, this_step().share_of_elements(term.elements).part(dtype))
    if term.kind == UNSEEN and choice is None:
        _warn(this_step().model, term.tensor)
    sums = term.kind == UNSEEN and choice == "sum"
    return _times(term.tensor, rows.present(dtype) if sums else rows.part(dtype))


def _part_of_function(term: Term, choice: str | None, whole: bool) -> tf.Tensor:
    r"""Return this replica's part of a function of other terms.

    Replicas r have parts :math:`p_{ir}` of the terms :math:`t_i = \sum_r p_{ir}`, and share
    :math:`w_r` of the rows. The part of :math:`f(t_1, t_2, ...)` has the value :math:`w_r f`, and
    the gradient

    .. math:: \sum_i \frac{\partial f}{\partial t_i} \nabla p_{ir}

    at the terms of the whole batch. So the gradients of all replicas add up to that of f.
    """
    assert term.function is not None
    summed = [x for x in term.leaves if x.kind != FIXED]
    parts = [
        _part_of_ratio(leaf, tf.ones_like(leaf.tensor))
        if leaf.kind == RATIO
        else _part_of_term(leaf, choice, whole)
        for leaf in summed
    ]
    totals = this_step().sum_over_rows([*map(tf.stop_gradient, parts)])
    fixed = [x.tensor for x in term.leaves if x.kind == FIXED]
    parts += [_times(x, _share().part(x.dtype)) for x in fixed]
    at = [tf.identity(x) for x in (*totals, *fixed)]
    keys = [x.tensor.ref() for x in summed] + [x.ref() for x in fixed]
    value = term.function.of(dict(zip(keys, at, strict=True)))
    inexact.warn_of_curvature(this_step().model)
    share = _share().part(value.dtype)
    return tf.stop_gradient(_times(value, share)) + _carrier(value, at, parts)


def _carrier(value: tf.Tensor, at: list[tf.Tensor], parts: list[tf.Tensor]) -> tf.Tensor:
    """Return 0, whose gradient by ``parts`` is that of ``value`` by ``at``.

    A product of slopes and parts would be NaN where one of them is infinite.
    """
    slopes = tf.gradients(value, at)

    @tf.custom_gradient
    def zero(*parts: tf.Tensor) -> Any:
        def gradient(of_zero: tf.Tensor) -> list[tf.Tensor]:
            return [
                tf.zeros_like(x) if slope is None else tf.cast(of_zero, x.dtype) * slope
                for x, slope in zip(parts, slopes, strict=True)
            ]

        return tf.zeros([], value.dtype), gradient

    found: tf.Tensor = zero(*parts)
    return found


def _times(value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Return the product, or 0 if the weight is 0: the mean of an empty batch is NaN."""
    return tf.math.multiply_no_nan(value, weight)


def _part_of_ratio(term: Term, slope: tf.Tensor) -> tf.Tensor:
    """Return this replica's part of a ratio: its part of the dividend over the whole divisor.

    The replica's own ratio cannot be used: it may be 0 / 0, and its gradient would be NaN.
    """
    assert term.fraction is not None
    above, below, divide = term.fraction
    return _sum_of_parts(above, terms_of(above), None, divide(slope, whole_divisor(below)))


# ---------------------------------------------------------------------- weights


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, tf.Tensor) and value.shape.rank == 0
    return is_number and (value.dtype.is_floating or value.dtype.is_integer)


def _share() -> Share:
    return this_step().of_rows


def _choice() -> str | None:
    choice: str | None = tf.distribute.get_strategy().own_losses
    return choice


def _weight(dtype: tf.DType) -> tf.Tensor:
    """Return the weight of a loss, or of a gradient, whose terms cannot be read."""
    if _choice() is None and not this_step().losses.are_read:
        _warn(this_step().model)
    return _share().part(dtype) if _choice() in (None, "mean") else _share().present(dtype)


def _unseen_weight(dtype: tf.DType) -> tf.Tensor:
    """Return the weight of ``_weight`` without the mark "already scaled"."""
    if _choice() in (None, "mean"):
        return _share().weight(dtype)
    return _share().presence(dtype)


def _weighted(gradient: Any) -> Any:
    weight = _weight(gradient.dtype)
    return with_numbers(gradient, lambda x: x * weight)


def _warn_of_eager_steps(model: Model) -> None:
    inexact.warn_once(
        f"the eager steps of {model.name!r} ({type(model).__name__}) use a loss object of Keras. "
        "If they add a mean or a sum of their own to it, that counts once for each replica: only "
        "in a graph can tfscale see the terms of a loss. Train without run_eagerly=True; "
        'ScaleStrategy(own_losses="scaled") ends this warning.'
    )


def _warn(model: Model, unseen: tf.Tensor | None = None) -> None:
    name = f"{model.name!r} ({type(model).__name__})"
    if name in _warned:
        return
    _warned.add(name)
    where = "" if unseen is None else f" (the term ends in {unseen.op.type}, {unseen.op.name!r})"
    logging.getLogger("tfscale").warning(
        "%s computes a loss without Keras's loss objects, and tfscale cannot see what the loss "
        "divides by%s. tfscale takes it for a mean over the replica's samples, and weights it by "
        'their number. If that is right, ScaleStrategy(own_losses="mean") ends this warning. If '
        'the loss is a sum over samples, pass own_losses="sum"; if it is divided by the size of '
        'the global batch already, own_losses="scaled". See docs/strategy.md, "Losses of your '
        'own".',
        name,
        where,
    )
