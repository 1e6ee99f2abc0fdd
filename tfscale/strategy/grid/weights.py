"""Weights of which each replica of a team holds a slice, by rules on their paths."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.layers import (
    axes_of_columns,
    axes_of_rows,
    axis_of_heads,
    layer_that_makes_a_weight,
    stock_layer,
    variable_being_made,
)
from tfscale.bridge.objects import native, path_of
from tfscale.bridge.protocols import Layer, Variable
from tfscale.exchange.team import Team
from tfscale.parallel.grid import Grid
from tfscale.parallel.layout import Repeated, Split
from tfscale.parallel.rules import COLUMNS, HEADS, ROWS, VOCABULARY, Rules
from tfscale.strategy.grid.collectives import whole_of
from tfscale.strategy.step import on_a_replica, this_step
from tfscale.strategy.variables import Placed, Placement

# Layers that a kind of rule can cut.
CUTS = {
    COLUMNS: ("Dense", "EinsumDense"),
    ROWS: ("Dense", "EinsumDense"),
    HEADS: ("MultiHeadAttention", "GroupedQueryAttention"),
    VOCABULARY: ("Embedding",),
}

_NOT_CUT = (
    "tensor[{pattern!r}]={kind!r} matches {path}, a weight of a {layer}, and {kind!r} cuts weights "
    "of {known}. Make the pattern match fewer paths, or choose another way to cut"
)
_DOES_NOT_DIVIDE = (
    "tensor[{pattern!r}]={kind!r} cuts {path} of shape {shape} along axis {axis} into {ranks} "
    "slices, and {ranks} does not divide {size}. Change the layer's size, or leave it out of the "
    "rules"
)
_MATCH_NOTHING = (
    "the rule {pattern!r} of tensor= matches no weight of {model!r}. It is a regular expression "
    "that is searched in paths such as {paths}. Correct it, or leave it out"
)


class SplitWeight(Placed):
    """Weight of which each replica of a team holds a slice.

    A layer that knows nothing of slices reads the whole weight, gathered from the team; the
    gradient is summed and cut. A layer that computes with slices, and the optimizer, read the
    replica's slice.
    """

    layout: Repeated

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of what a replica reads: the whole weight, or its slice."""
        return super().shape if _sees_slices() else tf.TensorShape(self.layout.shape)

    def value(self) -> tf.Tensor:
        """Return what a replica reads; TensorFlow calls this."""
        return tf.convert_to_tensor(self._get())

    def _get(self) -> Any:
        found = super()._get()
        if not on_a_replica() or _sees_slices():
            return found
        part = tf.convert_to_tensor(found)
        return whole_of(self.team, self.layout.inner, part, f"the slices of {self._common_name}")


def _sees_slices() -> bool:
    step = this_step()
    return step.is_reduced or step.sees_slices


class Slicing:
    """Rules that cut weights, and the layers whose weights they have cut.

    Args:
        rules: the rules.
        grid: the grid, with all its sizes.
        team: team of the replicas that hold the slices.
    """

    def __init__(self, rules: Mapping[str, str], grid: Grid, team: Team) -> None:
        self._rules, self.team = Rules(rules), team
        self._team_ranks = [grid.slice(rank) for rank in range(grid.replicas)]
        self._kinds: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def kind_of(self, layer: Layer) -> str | None:
        """Return how a layer is cut; None if it is whole."""
        return self._kinds.get(layer)

    def placement(self, beside: Any) -> Placement | None:
        """Return how the variable is made that is made now; None if each replica holds all of it.

        Args:
            beside: TensorFlow's variable of the weight whose slot is made; None for weights.
        """
        made = variable_being_made()
        if made is None:
            return None
        if isinstance(beside, SplitWeight):
            layout = beside.layout if tuple(made.shape) == beside.layout.shape else None
            kind: type[Placed] = Placed
        else:
            layout, kind = self._layout_of(made), SplitWeight
        if layout is None:
            return None
        hooks.ASSIGN_SLOT.put(made, assign_part, weakly=True)
        return Placement(layout, kind=kind, team=self.team)

    def _layout_of(self, made: Any) -> Repeated | None:
        layer = layer_that_makes_a_weight()
        if layer is None or not made.trainable:
            return None
        found = self._rules.find(path_of(made))
        if found is None:
            return None
        pattern, kind = found
        words = {"pattern": pattern, "kind": kind, "path": path_of(made)}
        owner = stock_layer(layer, CUTS[kind])
        if owner is None:
            known = " and ".join(CUTS[kind])
            raise ValueError(_NOT_CUT.format(**words, layer=type(layer).__name__, known=known))
        axis = _axes(owner, kind, path_of(made)).get(str(made.name))
        self._kinds[owner] = kind
        if axis is None:
            return None
        shape, ranks = tuple(made.shape), self.team.size
        if shape[axis] % ranks:
            more = {"shape": shape, "axis": axis, "ranks": ranks, "size": shape[axis]}
            raise ValueError(_DOES_NOT_DIVIDE.format(**words, **more))
        return Repeated.of(Split(shape, ranks, axis), self._team_ranks)

    def refuse_idle(self, name: str, weights: Iterable[Variable]) -> None:
        """Raise if a rule matches none of a model's weights."""
        paths = [path_of(v) for v in weights]
        for pattern in self._rules.idle(paths):
            some = ", ".join(paths[:5])
            raise ValueError(_MATCH_NOTHING.format(pattern=pattern, model=name, paths=some))


def _axes(layer: Layer, kind: str, path: str) -> dict[str, int]:
    """Return the axes along which a rule cuts a layer's weights, by name."""
    if kind == COLUMNS:
        return axes_of_columns(layer)
    if kind == ROWS:
        return axes_of_rows(layer)
    return axis_of_heads(path) if kind == HEADS else {"embeddings": 0}


def is_split(variable: Variable) -> bool:
    """Return whether each replica of a team holds a slice of a weight."""
    return isinstance(native(variable), SplitWeight)


def assign_part(assign: Any, slot: Any, value: Any) -> Any:
    """Assign a Keras variable; on a replica, its part, whose shape is not the variable's shape."""
    if not on_a_replica():
        return assign(slot, value)
    slot.value.assign(tf.cast(value, slot.value.dtype))
    return value
