"""Sharded state of optimizers (ZeRO-1 and 2): each replica updates the parts that it holds.

A step sums gradients so that each replica gets its parts of the sums; the user's own optimizer
updates them, with slots of which the replica holds these parts alone; then replicas send each other
the updated parts. Bytes are those of an all-reduce, whose halves these two exchanges are.

To Keras everything stays whole: weights, slots, their shapes and files. While the optimizer's
``apply`` runs on a replica, *working parts* take the place of weights.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.objects import (
    counter_of,
    innermost,
    key_of,
    native,
    path_of,
)
from tfscale.bridge.optimizers import constant_initializer, is_elementwise
from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.bridge.tensorflow import become, own_copy, replica_id
from tfscale.compression.policy import MethodPolicy
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.slots import Slots
from tfscale.parallel import deal
from tfscale.parallel.layout import Layout, Owned, SharedOut
from tfscale.parallel.matrix import Matrix
from tfscale.parallel.rows import part_of_rows
from tfscale.strategy import gradients
from tfscale.strategy.placed import OwnedCopy, Placed, Placement, WorkingPart, assign_part, placing
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.shards.rounded import (
    begin,
    exact_part,
    is_exact_part,
    refuse_other_parts,
    rounding,
)
from tfscale.strategy.shards.sharded_clipping import clipped, finite_on_all
from tfscale.strategy.step import during, this_step
from tfscale.strategy.variables import Weight

_UNKNOWN_OWNER = (
    "shard='optimizer' cannot tell to which weights these variables of {!r} belong: {}. Make them "
    "with self.add_variable_from_reference(weight, name=...) in its build(), or leave shard out"
)
_SEES_ALL = (
    "{!r} has its own {}(), which may need all weights at once, and with shard='optimizer' each "
    "replica calls it with the weights that the replica holds. Put what it does for one weight "
    "into update_step(), or leave shard out"
)

_SCALES_SEVERAL = (
    "shard='optimizer' does not know a LossScaleOptimizer of a MultiOptimizer: leave loss scaling "
    'out, for example by the policy "mixed_bfloat16", or leave shard out'
)

# It takes gradients, their variables, what replicas hold of these, and a rank.
SumParts = Callable[[list[Any], list[Variable], "Cut", int], list[Any]]

_building: contextvars.ContextVar[Parts | None] = contextvars.ContextVar("building", default=None)


class Parts:
    """Layouts of the weights of one optimizer, and the working parts that it updates.

    Attributes:
        variables: the weights, in the optimizer's order.
        layouts: their layouts.
        is_even: whether each replica holds an equal part of each weight.
        why: reason for the layouts.
        wires: the wires on which replicas send each other the weights.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        ranks: int,
        grid: Any,
        policy: MethodPolicy,
    ) -> None:
        self.variables = list(variables)
        self.is_even, self.why = is_elementwise(optimizer), _reason(optimizer)
        self.layouts = _dealt(variables, ranks, self.is_even, grid)
        self.wires = rounding(policy, variables)
        self._places = {key_of(v): place for place, v in enumerate(variables)}
        # Slots that the optimizer made without saying of which weight.
        self.listed: list[list[Variable]] = [[] for _ in self.layouts]
        self._working: list[WorkingPart] = []

    def make_working_parts(self) -> None:
        """Make the working parts; the optimizer's ``build`` calls this in the strategy's scope."""
        every = zip(self.variables, self.layouts, strict=True)
        self._working = [exact_part(v, each, self.wires, _working_part) for v, each in every]

    def layout_of(self, weight: Variable) -> Layout | None:
        """Return the layout of a weight, and of its slots; None for other variables."""
        place = self._places.get(key_of(weight))
        return None if place is None else self.layouts[place]

    def slots(self, optimizer: Optimizer) -> list[list[Variable]]:
        """Return the optimizer's slots of each weight, and the exact value of a rounded one."""
        every = [(v, getattr(native(v), "layout", None)) for v in optimizer.variables]
        each_one = zip(self.layouts, self.listed, self._working, strict=True)
        return [
            [v for v, own in every if own is layout] + listed + [one] * is_exact_part(one)
            for layout, listed, one in each_one
        ]

    def fill(self, rank: int) -> None:
        """Make a rank's working parts parts of its weights, unless they have the exact values.

        They take no memory of their own until the optimizer updates them.
        """
        for working, layout in zip(self._working, self.layouts, strict=True):
            refuse_other_parts(working)
            held = layout.view(tf.convert_to_tensor(native(working.weight)), rank)
            if is_exact_part(working):
                begin(working, held)
            else:
                working.assign(held)

    def of(self, variables: Sequence[Variable]) -> Cut:
        """Return what replicas hold of these weights."""
        return Cut([self.layouts[self._places[key_of(v)]] for v in variables], self.is_even)

    def updated_by(self, rank: int, cut: Cut, sums: Sequence[Any]) -> list[int]:
        """Return which of some weights a rank updates.

        A rank that holds nothing of the weights with gradients updates an empty part, so that it
        counts steps as others do. Equal parts may be empty, too: norms need all of them.
        """
        if self.is_even:
            return list(range(len(cut.layouts)))
        given = [i for i, total in enumerate(sums) if total is not None]
        return [i for i in given if cut.layouts[i].held(rank)] or given[:1]

    def working(self, variables: Sequence[Variable]) -> list[WorkingPart]:
        """Return the working parts of these weights."""
        return [self._working[self._places[key_of(v)]] for v in variables]


class Cut:
    """The parts of some weights that replicas hold: see ``exchange.reducer.Cut``."""

    def __init__(self, layouts: list[Layout], is_even: bool) -> None:
        self.layouts, self.is_even = layouts, is_even

    def matrix(self, members: Sequence[int]) -> Matrix:
        """Return the matrix of these weights."""
        return Matrix(tuple(self.layouts[i] for i in members))


class Sharding:
    """Optimizers of a strategy, each with its ``Parts``.

    Args:
        spreader: reducer that gives all replicas the updated weights, by its policy.
    """

    def __init__(self, spreader: Reducer) -> None:
        self.spreader = spreader
        self._of: weakref.WeakKeyDictionary[Any, Parts] = weakref.WeakKeyDictionary()
        self._failed: weakref.WeakKeyDictionary[Any, Exception] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Optimizer) -> Parts:
        """Return the parts of an optimizer that is built."""
        inner = innermost(optimizer)
        if passes_on(inner):
            raise ValueError(_SCALES_SEVERAL)
        for each in (optimizer, inner):
            if each in self._failed:  # Keras, or a model's first step, may have gone on
                raise self._failed[each]
        return self._of[inner]

    def build(
        self,
        build: Callable[..., None],
        optimizer: Optimizer,
        variables: Sequence[Variable],
        grid: Any,
    ) -> None:
        """Build an optimizer, with slots of which each replica holds its parts.

        Args:
            build: method of the optimizer.
            optimizer: the optimizer.
            variables: weights that it updates.
            grid: what replicas hold of weights: ``strategy.parts``.
        """
        try:
            _refuse(optimizer)
            if is_wrapper(optimizer):
                build(optimizer, variables)
                return
            ranks = self.spreader.team.size
            parts = Parts(optimizer, list(variables), ranks, grid, self.spreader.policy)
            _build(build, optimizer, parts)
            self._of[optimizer] = parts
        except Exception as error:
            self._failed[optimizer] = error
            raise


def _dealt(variables: Sequence[Variable], ranks: int, is_even: bool, grid: Any) -> list[Layout]:
    """Return the layouts of weights' state: those who hold the same of a weight share it out."""
    of_twins: dict[Any, list[int]] = {}
    for place, variable in enumerate(variables):
        of_twins.setdefault(grid.gradients.twins_of(variable), []).append(place)
    found: dict[int, Layout] = {}
    for twins, places in of_twins.items():
        if twins is None:
            made = deal.dealt([tuple(variables[i].shape) for i in places], ranks, is_even)
        else:
            outers = [native(variables[i]).layout for i in places]
            made = deal.shared_out(outers, twins.ranks, is_even)
        found |= dict(zip(places, made, strict=True))
    return [found[i] for i in range(len(variables))]


def _build(build: Callable[..., None], optimizer: Optimizer, parts: Parts) -> None:
    """Build an optimizer, whose slots are made in parts."""
    before = {id(v) for v in optimizer.variables}
    token = _building.set(parts)
    try:
        with hooks.ADD_VARIABLE.on(optimizer, _add_variable):
            build(optimizer, parts.variables)
        parts.make_working_parts()
    finally:
        _building.reset(token)
    made = [v for v in optimizer.variables if id(v) not in before]
    _own_listed(optimizer, parts, {id(v) for v in made})
    _refuse_unplaced(optimizer, made)
    for slot in made:
        if isinstance(native(slot), Placed):
            hooks.ASSIGN_SLOT.put(slot, assign_part, weakly=True)


def _own_listed(optimizer: Optimizer, parts: Parts, made: set[int]) -> None:
    """Give slots that were made without saying which weight they are of to its owner.

    Optimizers keep such slots in lists with one entry for each weight.
    """
    if parts.is_even:
        return
    for kept in vars(optimizer).values():
        if not isinstance(kept, list | tuple) or len(kept) != len(parts.layouts):
            continue
        for slot, layout, listed in zip(kept, parts.layouts, parts.listed, strict=True):
            own = native(slot) if id(slot) in made else None
            if isinstance(own, Weight) and not isinstance(own, Placed):
                become(own, OwnedCopy)
                own.layout = Owned(tuple(slot.shape), layout.ranks, layout.holder or 0)
                listed.append(slot)


def placement_beside(weight: Any) -> Placement | None:
    """Return how a variable is made beside a weight; None if no slot is made now."""
    parts = _building.get()
    layout = None if parts is None or weight is None else parts.layout_of(weight)
    return None if layout is None else Placement(layout, _fill.get())


_fill: contextvars.ContextVar[Any] = contextvars.ContextVar("fill", default=None)


def _add_variable(
    add: Callable[..., Any],
    optimizer: Optimizer,
    shape: Any,
    initializer: Any = "zeros",
    *args: Any,
    **more: Any,
) -> Any:
    token = _fill.set(constant_initializer(initializer))
    try:
        return add(optimizer, shape, initializer, *args, **more)
    finally:
        _fill.reset(token)


def passes_on(optimizer: Optimizer) -> bool:
    """Return whether an optimizer only deals gradients out to others, which apply them."""
    return hasattr(optimizer, "optimizers")


def is_wrapper(optimizer: Optimizer) -> bool:
    """Return whether an optimizer leaves the updates of weights to others."""
    return hasattr(optimizer, "inner_optimizer") or passes_on(optimizer)


def _working_part(weight: Variable, layout: Layout) -> WorkingPart:
    own = native(weight)
    with placing(Placement(layout, tf.zeros)):
        name = own.name.split(":")[0]
        made = tf.Variable(tf.zeros([], own.dtype), trainable=False, name=name, dtype=own.dtype)
    working: WorkingPart = become(made, WorkingPart)
    working.weight = weight
    return working


# ------------------------------------------------------------------------ a step


def apply(
    strategy: Strategy,
    original: Callable[..., Any],
    optimizer: Optimizer,
    grads: list[Any],
    variables: list[Variable],
    sum_parts: SumParts,
) -> None:
    """Sum gradients, update this replica's parts of the weights, and get the parts of others.

    Args:
        strategy: strategy of the optimizer.
        original: the optimizer's method ``apply``.
        optimizer: the optimizer.
        grads: gradients, as ``sum_parts`` needs them.
        variables: variables of the gradients.
        sum_parts: function of gradients, their variables, what replicas hold of these, and this
            replica's rank that returns its parts of the sums over all replicas.
    """
    parts = strategy.sharding.of(optimizer)
    rank = strategy.extended.first_rank + replica_id()
    inner, cut = innermost(optimizer), parts.of(variables)
    curvature = gradients.measured_curvature(optimizer, grads, variables)
    sums = sum_parts(grads, variables, cut, rank)
    curvature = gradients.sum_of_curvature(strategy, optimizer, variables, curvature)
    working = parts.working(variables)
    held = parts.updated_by(rank, cut, sums)
    with (
        during(this_step().as_reduced()),
        _seeing(strategy, optimizer, parts),
        gradients.given_to(optimizer, [curvature[i] for i in held] if curvature else []),
    ):
        parts.fill(rank)
        before = own_copy(counter_of(inner)).read_value()
        original([sums[i] for i in held], [working[i] for i in held])
        counted = own_copy(counter_of(inner)).read_value()
        _spread(strategy, optimizer, parts, variables, counted - before)
        parts.fill(rank)  # what the optimizer has updated is in the weights now


def scattered(
    strategy: Strategy,
    optimizer: Optimizer,
    grads: list[Any],
    variables: list[Variable],
    cut: Cut,
    rank: int,
) -> list[Any]:
    """Return a rank's parts of the sums of all replicas' gradients; None stays None."""
    state, own = Slots.of(optimizer, strategy), strategy.parts.gradients
    copies = own.of_copies(grads, variables)
    strategy.reducer.prepare(state, optimizer, variables, copies)
    scale = gradients.scale_of_losses(optimizer)
    sums = strategy.reducer.scatter(copies, variables, optimizer, state, cut, scale)
    sums = [part_of_rows(x, layout, rank) for x, layout in zip(sums, cut.layouts, strict=True)]
    shares = own.scatter_sums(grads, variables, cut.layouts, rank)
    return [one if share is None else share for one, share in zip(sums, shares, strict=True)]


def cut_out(sums: list[Any], variables: list[Variable], cut: Cut, rank: int) -> list[Any]:
    """Return a rank's parts of whole sums; None stays None."""

    def part(total: Any, layout: Layout) -> Any:
        if total is None or isinstance(total, tf.IndexedSlices):
            return part_of_rows(total, layout, rank)
        if isinstance(layout, SharedOut):
            return layout.share(total, rank)
        return layout.part(total, rank)

    return [part(total, layout) for total, layout in zip(sums, cut.layouts, strict=True)]


@contextlib.contextmanager
def _seeing(strategy: Strategy, optimizer: Optimizer, parts: Parts) -> Iterator[None]:
    """Let an optimizer see parts where it looks at several weights, on this replica."""
    inner, team = innermost(optimizer), strategy.extended.team
    every = parts.working(parts.variables)

    def with_parts(original: Callable[..., Any], optimizer: Any, _: Any) -> Any:
        return original(optimizer, every)

    with contextlib.ExitStack() as stack:
        on = stack.enter_context
        clip = functools.partial(clipped, team, parts.is_even)
        on(hooks.CLIP_GRADIENTS.on(inner, clip, in_thread=True))
        if inner.use_ema:
            on(hooks.AVERAGE_WEIGHTS.on(inner, with_parts, in_thread=True))
            on(hooks.TAKE_AVERAGES.on(inner, with_parts, in_thread=True))
        if optimizer is not inner:
            finite = functools.partial(finite_on_all, team)
            on(hooks.CHECK_FINITE.on(optimizer, finite, in_thread=True))
        yield


def _spread(
    strategy: Strategy,
    optimizer: Optimizer,
    parts: Parts,
    variables: list[Variable],
    counted: tf.Tensor,
) -> None:
    """Give all replicas the updated weights, and apply the weights' constraints.

    Args:
        strategy: strategy of the optimizer.
        optimizer: optimizer that has updated this replica's parts.
        parts: parts of the optimizer's weights.
        variables: weights that the optimizer got gradients of.
        counted: growth of the optimizer's counter: 0 if a gradient was not finite and the optimizer
            scales the loss.
    """
    inner = innermost(optimizer)
    changed = parts.variables if inner.use_ema else variables  # all may have become averages

    def spread() -> tf.Operation:
        shared = [v for v in changed if isinstance(parts.layout_of(v), SharedOut)]
        copies = [v for v in changed if not isinstance(parts.layout_of(v), SharedOut)]
        own = [own_copy(one).read_value() for one in parts.working(copies)]
        cut, wires = parts.of(copies), parts.wires
        strategy.sharding.spreader.spread(own, copies, optimizer, cut, wires)
        if shared:
            _join_shares(strategy, parts, shared)
        return tf.no_op()

    def constrain() -> tf.Operation:
        for variable in variables:
            constraint = getattr(variable, "constraint", None)
            if constraint is not None:
                native(variable).assign(constraint(variable))
        return tf.no_op()

    if inner.gradient_accumulation_steps and not inner.ema_overwrite_frequency:
        done = own_copy(counter_of(inner)).read_value()
        tf.cond(done % inner.gradient_accumulation_steps == 0, spread, tf.no_op)
    else:
        spread()
    if optimizer is inner:
        constrain()
    else:
        tf.cond(counted > 0, constrain, tf.no_op)


def _join_shares(strategy: Strategy, parts: Parts, variables: Sequence[Variable]) -> None:
    """Give all replicas that hold the same parts of weights what each has updated of them."""
    replica = replica_id()
    own = [own_copy(one).read_value() for one in parts.working(variables)]
    rank, layouts = strategy.extended.first_rank + replica, parts.of(variables).layouts
    wholes = strategy.parts.gradients.join_shares(own, variables, layouts, rank)
    for variable, whole in zip(variables, wholes, strict=True):
        native(variable).values[replica].assign(whole)


# ---------------------------------------------------------------------- refusals

# Methods that see all weights or gradients of a step.
_OF_ALL = (
    *("apply", "_backend_apply_gradients", "_backend_update_step", "_clip_gradients"),
    *("_filter_empty_gradients", "_overwrite_variables_directly_with_gradients"),
    *("_all_reduce_sum_gradients", "_distributed_tf_update_step"),
)


def _refuse(optimizer: Optimizer) -> None:
    for name in _OF_ALL:
        made_by = getattr(type(optimizer), name).__module__.split(".")[0]
        if made_by not in ("keras", "tfscale"):
            raise ValueError(_SEES_ALL.format(type(optimizer).__name__, name))


def _refuse_unplaced(optimizer: Optimizer, made: Sequence[Variable]) -> None:
    unplaced = [v for v in made if not isinstance(native(v), Placed) and v.shape.rank]
    if unplaced:
        paths = ", ".join(map(path_of, unplaced[:4]))
        raise ValueError(_UNKNOWN_OWNER.format(type(optimizer).__name__, paths))


def _reason(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    if is_elementwise(optimizer):
        return f"{name} updates each number by itself"
    return f"{name} may need all numbers of a weight"
