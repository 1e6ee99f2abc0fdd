"""Weights of which each replica of a team holds a part: a slice by a rule, or an equal share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.calls import is_in_a_loop_of_a_replica
from tfscale.bridge.layers import (
    CONVOLUTIONS,
    axes_of_columns,
    axes_of_rows,
    axis_of_heads,
    layer_that_makes,
    stock_layer,
    variable_being_made,
)
from tfscale.bridge.objects import is_made, layers_of, native, path_of
from tfscale.bridge.protocols import Layer, Variable
from tfscale.bridge.spatial import convolutions
from tfscale.bridge.tensorflow import replica_id
from tfscale.exchange.rows import with_numbers
from tfscale.exchange.team import Team
from tfscale.parallel.deal import weight_in_parts
from tfscale.parallel.experts import Experts
from tfscale.parallel.grid import Grid
from tfscale.parallel.layout import Copy, Repeated, Split
from tfscale.parallel.rows import part_of_total
from tfscale.parallel.rules import AXES, COLUMNS, HEADS, ROWS, VOCABULARY, Rules
from tfscale.strategy.grid.collectives import joined, summed, whole_of
from tfscale.strategy.placed import Placed, Placement, assign_part
from tfscale.strategy.step import on_a_replica, this_step

# Layers that a kind of rule can cut.
CUTS = {
    COLUMNS: ("Dense", "EinsumDense", *CONVOLUTIONS),
    ROWS: ("Dense", "EinsumDense", *CONVOLUTIONS),
    HEADS: ("MultiHeadAttention", "GroupedQueryAttention"),
    VOCABULARY: ("Embedding", "ReversibleEmbedding"),
    **{axis: convolutions(axis) for axis in AXES},
}

# How to find the axes of a layer's weights, by the kind of rule.
_AXES_OF_PRODUCTS = {COLUMNS: axes_of_columns, ROWS: axes_of_rows}

_NO_AXIS = {
    COLUMNS: (
        "tensor[{pattern!r}]={kind!r} matches {path}, whose layer computes {equation!r}: the last "
        "axis of its output is no axis of its kernel. Make the pattern match fewer paths"
    ),
    ROWS: (
        "tensor[{pattern!r}]={kind!r} matches {path}, whose layer computes {equation!r}: {kind!r} "
        "needs a sum over exactly one axis of the kernel. Make the pattern match fewer paths, or "
        "reshape the input, so that the axes that are summed become one"
    ),
}
_NOT_CUT = (
    "tensor[{pattern!r}]={kind!r} matches {path}, a weight of a {layer}, and {kind!r} is for "
    "{known}. Make the pattern match fewer paths, or choose another way to cut"
)
_NOT_ALL = (
    "tensor[{pattern!r}]={kind!r} matches {path}, but not {earlier}, and a layer is cut with all "
    "its weights. Make the pattern match the path of the layer, such as {layer}"
)
_IN_A_LOOP = (
    "a loop reads {}, of which each replica holds a part, and the gradient of the exchange is not "
    "defined in a loop. Read the weight before the loop: value = tf.convert_to_tensor(weight)"
)
_ROWS_OF_PARTS = (
    "the gradient of {} is sparse, and with shard='all' a train_step of your own cannot get it. "
    "Leave train_step to Keras, or take shard='optimizer'"
)
_DOES_NOT_DIVIDE = (
    "tensor[{pattern!r}]={kind!r} cuts {path} of shape {shape} along axis {axis} into {ranks} "
    "slices, and {ranks} does not divide {size}. Change the layer's size, or leave it out of the "
    "rules"
)
_EXPERTS_DO_NOT_DIVIDE = (
    "the layer {layer!r} has {experts} experts, and Grid(experts={ranks}) shares them out among "
    "{ranks} replicas, and {ranks} does not divide {experts}. Change the number of experts, or the "
    "grid"
)
_NO_EXPERTS = (
    "Grid(experts={ranks}) shares experts out, and the model {model!r} has no layer "
    "tfscale.parallel.Experts. Add one, or leave the axis experts out"
)
_MATCH_NOTHING = (
    "the rule {pattern!r} of tensor= matches no weight of {model!r}, and has cut no other model. "
    "It is a regular expression that is searched in paths such as {paths}. Correct it, or leave it "
    "out"
)


class SplitWeight(Placed):
    """Weight of which each replica of a team holds a part.

    A layer that knows nothing of parts reads the whole weight, gathered from the team; the gradient
    is summed and cut. A layer that computes with slices, and the optimizer, read the replica's
    part.
    """

    layout: Repeated

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of what a replica reads: the whole weight, or its part."""
        return super().shape if _sees_parts() else tf.TensorShape(self.layout.shape)

    def _get(self) -> Any:
        found = super()._get()
        if not on_a_replica() or _sees_parts():
            return found
        if (read := this_step().read_before.get(id(self))) is not None:
            return read
        if is_in_a_loop_of_a_replica():
            raise ValueError(_IN_A_LOOP.format(self.keras_path))
        part, name = tf.convert_to_tensor(found), f"the parts of {self.keras_path}"
        team, cut = self.team, self.layout.inner

        def gather(part: tf.Tensor) -> tf.Tensor:
            return whole_of(team, cut, part, name)

        def again(part: tf.Tensor) -> tf.Tensor:
            return joined(team, cut, part, f"{name}, again")

        weights = this_step().whole_weights
        return gather(part) if weights is None else weights.whole(self, part, gather, again)


def _sees_parts() -> bool:
    step = this_step()
    return step.is_reduced or step.sees_parts


class CannotBeCut(ValueError):
    """A layer that cannot be held in parts: who builds a model must not go on without it."""


class Slicing:
    """Weights of which the replicas of a team hold parts; a subclass says which.

    Args:
        team: team of the replicas that hold the parts.

    Attributes:
        reads_other_rows: whether the replicas of a team read different rows, so that the backward
            pass sums their gradients.
    """

    reads_other_rows = True

    def __init__(self, team: Team) -> None:
        self.team = team

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
            layout, kind = self._layout_of_weight(made), SplitWeight
        if layout is None:
            return None
        hooks.ASSIGN_SLOT.put(made, assign_part, weakly=True)
        return Placement(layout, kind=kind, team=self.team)

    def _layout_of_weight(self, made: Any) -> Repeated | None:
        layer = layer_that_makes(made)
        return None if layer is None or not made.trainable else self.layout(layer, made)

    def layout(self, layer: Layer, weight: Any) -> Repeated | None:
        """Return the layout of a weight of a layer; None if each replica holds all of it."""
        raise NotImplementedError

    def check(self, model: Any) -> None:
        """Raise if a model cannot be trained with its weights in parts."""


class FlatParts(Slicing):
    """Weights in equal parts, one for each replica of a team: ``shard="all"``."""

    def layout(self, layer: Layer, weight: Any) -> Repeated | None:
        """See ``Slicing``."""
        ranks = self.team.size
        layout = weight_in_parts(tuple(weight.shape), ranks)
        if isinstance(layout, Copy) or not tf.as_dtype(weight.dtype).is_floating:
            return None
        return Repeated.of(layout, range(ranks))


class SharesOfExperts(Slicing):
    """Weights of experts, of which each replica of a team holds an equal share.

    Args:
        grid: the grid, with all its sizes.
        team: team of the replicas that hold all experts together.
    """

    def __init__(self, grid: Grid, team: Team) -> None:
        super().__init__(team)
        self._team_ranks = [grid.share_of_experts(rank) for rank in range(grid.replicas)]

    def layout(self, layer: Layer, weight: Any) -> Repeated | None:
        """See ``Slicing``."""
        if not isinstance(layer, Experts) or weight.name not in layer.NAMES:
            return None
        if layer.experts % self.team.size:
            words = {"layer": layer.name, "experts": layer.experts, "ranks": self.team.size}
            raise CannotBeCut(_EXPERTS_DO_NOT_DIVIDE.format(**words))
        return Repeated.of(Split(tuple(weight.shape), self.team.size, 0), self._team_ranks)

    def check(self, model: Any) -> None:
        """Raise if a model has no experts."""
        if not any(isinstance(layer, Experts) for layer in layers_of(model)):
            raise ValueError(_NO_EXPERTS.format(ranks=self.team.size, model=model.name))


class SlicesByRules(Slicing):
    """Weights in slices along one axis, by rules on their paths: ``tensor={...}``.

    Args:
        rules: the rules.
        grid: the grid, with all its sizes.
        team: team of the replicas that hold the slices.
    """

    reads_other_rows = False

    def __init__(self, rules: Mapping[str, str], grid: Grid, team: Team) -> None:
        super().__init__(team)
        self._rules = Rules(rules)
        self._team_ranks = [grid.slice(rank) for rank in range(grid.replicas)]
        self._cut: weakref.WeakKeyDictionary[Any, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._used: set[str] = set()  # patterns that have cut a layer of any model

    def kind_of(self, layer: Layer) -> str | None:
        """Return how a layer is cut; None if it is whole."""
        return self._cut[layer][1] if layer in self._cut else None

    def layout(self, layer: Layer, weight: Any) -> Repeated | None:
        """See ``Slicing``."""
        owner = self._cut_layer(layer) or self._begin_cut(layer, weight)
        if owner is None:
            return None
        pattern, kind = self._cut[owner]
        axis = _axis(owner, kind, weight)
        if axis is None:
            return None
        words = {"pattern": pattern, "kind": kind, "path": path_of(weight)}
        shape, ranks = tuple(weight.shape), self.team.size
        if shape[axis] % ranks:
            more = {"shape": shape, "axis": axis, "ranks": ranks, "size": shape[axis]}
            raise CannotBeCut(_DOES_NOT_DIVIDE.format(**words, **more))
        return Repeated.of(Split(shape, ranks, axis), self._team_ranks)

    def _cut_layer(self, layer: Layer) -> Any:
        """Return the layer to which a weight of ``layer`` belongs, if an earlier weight is cut."""
        kinds = {kind for _, kind in self._cut.values()}
        owners = (stock_layer(layer, CUTS[kind]) for kind in sorted(kinds))
        return next((owner for owner in owners if owner is not None and owner in self._cut), None)

    def _begin_cut(self, layer: Layer, weight: Any) -> Any:
        """Return the layer to which a weight of ``layer`` belongs, if a rule matches its path."""
        path = path_of(weight)
        found = self._rules.find(path)
        if found is None:
            return None
        pattern, kind = found
        words = {"pattern": pattern, "kind": kind, "path": path}
        owner = stock_layer(layer, CUTS[kind])
        if owner is None:
            known = " and ".join(CUTS[kind])
            raise CannotBeCut(_NOT_CUT.format(**words, layer=type(layer).__name__, known=known))
        if kind in _AXES_OF_PRODUCTS and "kernel" not in _AXES_OF_PRODUCTS[kind](owner):
            raise CannotBeCut(_NO_AXIS[kind].format(**words, equation=owner.equation))
        for other in owner.weights:
            if other is not weight and is_made(other) and _axis(owner, kind, other) is not None:
                words |= {"earlier": path_of(other), "layer": path_of(owner)}
                raise CannotBeCut(_NOT_ALL.format(**words))
        self._cut[owner] = found
        self._used.add(pattern)
        return owner

    def check(self, model: Any) -> None:
        """Raise if a rule matches none of a model's weights, and has cut no other model.

        A program may train several models, or a part of a model, with one set of rules.
        """
        paths = [path_of(v) for v in model.weights]
        for pattern in (one for one in self._rules.idle(paths) if one not in self._used):
            some = ", ".join(paths[:5])
            raise ValueError(_MATCH_NOTHING.format(pattern=pattern, model=model.name, paths=some))


def _axis(layer: Layer, kind: str, weight: Any) -> int | None:
    """Return the axis along which a rule cuts a weight of a layer; None if it is whole."""
    axes = {"embeddings": 0, "reverse_embeddings": 1}
    if kind in _AXES_OF_PRODUCTS:
        axes = _AXES_OF_PRODUCTS[kind](layer)
    elif kind == HEADS:
        axes = axis_of_heads(path_of(weight))
    elif kind in AXES:
        axes = {}
    return axes.get(str(weight.name))


def is_split(variable: Variable) -> bool:
    """Return whether each replica of a team holds a part of a weight."""
    return isinstance(native(variable), SplitWeight)


def whole_gradient(gradient: Any, weight: SplitWeight) -> Any:
    """Return the gradient of a whole weight, from this replica's part of it."""
    team, layout, name = weight.team, weight.layout.inner, f"the gradient of {path_of(weight)}"
    if not isinstance(gradient, tf.IndexedSlices):
        return whole_of(team, layout, gradient, name)
    if not isinstance(layout, Split) or layout.axis > 0:
        raise ValueError(_ROWS_OF_PARTS.format(path_of(weight)))

    def joined(replica: int, own: list[Any]) -> list[Any]:
        values, indices = own
        counts = team.count_rows(replica, values, name)
        first = layout.range(team.rank(replica)).start
        places = tf.cast(indices, tf.int64) + first
        return [team.join(replica, each, counts, name) for each in (values, places)]

    values, places = team.together(joined, [gradient.values, gradient.indices])
    return tf.IndexedSlices(values, places, tf.constant(layout.shape, tf.int64))


def part_of_gradient(gradient: Any, weight: SplitWeight) -> Any:
    """Return this replica's part of the gradient of a whole weight."""
    rank = weight.team.rank(replica_id())
    return part_of_total(gradient, weight.layout.inner, rank)


def summed_gradient(team: Team, gradient: Any, name: str) -> Any:
    """Return the gradient of a weight with copies, of which each replica of a team has a part."""
    return with_numbers(gradient, lambda x: summed(team, x, name))


def share_of_gradient(gradient: Any, replicas: int) -> Any:
    """Return an equal share of a gradient that all replicas of a team have."""
    share = tf.constant(1 / replicas, gradient.dtype)
    return with_numbers(gradient, lambda x: x * share)
