"""Layers that compute with slices of their weights, while a step of a grid is traced.

A layer that is cut along the last axis of its output (*columns*) needs no communication, if all
that reads its output takes slices; else the output is gathered. A layer that is cut along the axis
that it sums over (*rows*) computes a part of a sum, which the team adds up. So a pair of both sends
one sum in the forward pass and one in the backward pass. Attention is cut by heads: its projections
are columns, and its output projection is rows.

A layer with code of its own, or with more weights, is left as it is: it reads whole weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.layers import (
    activation_is_elementwise,
    axes_of_rows,
    axis_of_input,
    axis_of_scores,
    calls_stock_code,
    channels_can_be_cut,
    dropout_of,
    is_elementwise,
    output_projection_of,
    product,
    projections_of,
)
from tfscale.bridge.objects import native, with_mask, with_operations
from tfscale.bridge.protocols import Layer
from tfscale.bridge.tensorflow import replica_id
from tfscale.parallel.rules import COLUMNS, HEADS, ROWS, WEIGHTS
from tfscale.strategy.grid import losses
from tfscale.strategy.grid.collectives import Along, summed, whole_of
from tfscale.strategy.grid.halo import Spread
from tfscale.strategy.grid.spread import SpreadArrays
from tfscale.strategy.grid.teams import GridTeams
from tfscale.strategy.grid.weights import SlicesByRules, is_split
from tfscale.strategy.step import during, on_a_replica, this_step

_AXIS_OF_HEADS = 0  # of the kernel of an attention's output projection

# Difference between the seeds of two slices, in the first word of a seed: another number than the
# one by which the seeds of two parts of a batch differ.
_FOLD = 0x85EBCA6B

_OUTSIDE = "indices outside of the rows of the layer {}, from 0 to less than:"


@contextlib.contextmanager
def reading_before_loops(layers: Sequence[Layer]) -> Iterator[None]:
    """Make recurrent layers read whole weights before their loops, within this context."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, keras.layers.RNN):
                stack.enter_context(hooks.SPLIT_CALL.on(layer, _read_before))
        yield


def _read_before(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    if not on_a_replica() or this_step().is_reduced:
        return original(layer, *args, **kwargs)
    read = {id(native(v)): tf.convert_to_tensor(native(v)) for v in layer.weights if is_split(v)}
    with during(dataclasses.replace(this_step(), read_before=read)):
        return original(layer, *args, **kwargs)


class SplitLayers:
    """Layers of a grid that compute with slices of their weights.

    Args:
        teams: teams of the grid.
        slicing: rules that have cut the layers' weights.
    """

    def __init__(self, teams: GridTeams, slicing: SlicesByRules) -> None:
        self._teams, self._slicing = teams, slicing
        self._team = slicing.team

    @contextlib.contextmanager
    def computing(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Make these layers compute with their slices, on replicas, within this context."""
        kinds = {layer: kind for layer in layers if (kind := self._kind(layer)) is not None}
        arrays = SpreadArrays(self._team)
        with contextlib.ExitStack() as stack:
            stack.enter_context(losses.taking_slices(arrays, self._team))
            for layer, kind in kinds.items():
                for hook in self._hooks(layer, kind, arrays):
                    stack.enter_context(hook)
            if COLUMNS in kinds.values():
                for each in with_operations(layers):
                    if is_elementwise(each) and calls_stock_code(each):
                        stack.enter_context(self._on(each, self._elementwise, arrays=arrays))
            yield
        arrays.gather_used()

    def _kind(self, layer: Layer) -> str | None:
        kind = self._slicing.kind_of(layer)
        if kind not in WEIGHTS or not calls_stock_code(layer) or not channels_can_be_cut(layer):
            return None
        if kind != HEADS:
            return kind
        projections = projections_of(layer)
        if any(each.activity_regularizer is not None for each in projections):
            return None  # it takes whole outputs
        inner = [*projections, output_projection_of(layer)]
        return kind if all(map(calls_stock_code, inner)) else None

    def _hooks(
        self, layer: Layer, kind: str, arrays: SpreadArrays
    ) -> Iterator[contextlib.AbstractContextManager[Any]]:
        if kind == COLUMNS:
            yield self._on(layer, self._columns, shown_in=arrays)
        elif kind == ROWS:
            axis = axes_of_rows(layer)["kernel"]
            yield self._on(layer, self._rows, cut_along=axis, arrays=arrays)
        elif kind == HEADS:
            for projection in projections_of(layer):
                yield self._on(projection, self._columns, shown_in=None)
            output = output_projection_of(layer)
            yield self._on(output, self._rows, cut_along=_AXIS_OF_HEADS, arrays=None)
            yield hooks.INPUT_SPEC.showing(output, None)  # it names the size of the whole input
            yield self._on(layer, self._attention)
            yield self._differing_seeds(dropout_of(layer))
        else:
            yield self._on(layer, self._vocabulary, shown_in=arrays)

    def _on(
        self, layer: Layer, replacement: Callable[..., Any], **more: Any
    ) -> contextlib.AbstractContextManager[Any]:
        def call(original: Callable[..., Any], layer: Layer, *args: Any, **kwargs: Any) -> Any:
            if not on_a_replica() or this_step().is_reduced:
                return original(layer, *args, **kwargs)
            return replacement(original, layer, *args, **kwargs, **more)

        return hooks.SPLIT_CALL.on(layer, call)

    def _differing_seeds(self, layer: Any) -> contextlib.AbstractContextManager[Any]:
        """Make a layer draw different random numbers for each slice of its input."""
        generator = getattr(layer, "seed_generator", None)
        if generator is None:
            return contextlib.nullcontext()

        def of_slice(draw: Callable[..., Any], generator: Any, *args: Any, **more: Any) -> Any:
            seed = draw(generator, *args, **more)
            if not on_a_replica():
                return seed
            fold = self._slice() * _FOLD % (1 << 32)
            return seed + tf.cast(tf.constant([fold, 0], tf.int64), seed.dtype)

        return hooks.SEED_OF_SLICE.on(generator, of_slice)

    def _slice(self) -> int:
        return self._teams.slice(replica_id())

    # -- kinds

    def _columns(
        self,
        _: Any,
        layer: Any,
        inputs: Any,
        training: Any = None,
        *,
        shown_in: SpreadArrays | None,
    ) -> Any:
        """Return a layer's units, of which this replica computes some.

        Args:
            layer: the layer.
            inputs: its whole input.
            training: has no meaning here.
            shown_in: arrays of this step; None if the caller takes the slice.
        """
        with seeing_parts():
            x = product(layer, inputs, tf.convert_to_tensor(layer.kernel))
            if layer.bias is not None:
                # Keras reads shapes, and a variable has that of the whole bias.
                x = keras.ops.add(x, tf.convert_to_tensor(layer.bias))
        if shown_in is None:
            return _activated(layer, x)
        if activation_is_elementwise(layer):
            return self._shown(shown_in, _activated(layer, x), layer.name)
        return _activated(layer, self._shown(shown_in, x, layer.name))

    def _elementwise(
        self, original: Any, layer: Any, *args: Any, arrays: SpreadArrays, **kwargs: Any
    ) -> Any:
        """Return what a layer computes by each index, of an array of which others have slices."""
        spread = arrays.of(args[0]) if args and arrays.can_be_made else None
        if spread is None:
            return original(layer, *args, **kwargs)
        with self._differing_seeds(layer):
            part = original(layer, spread.part, *args[1:], **kwargs)
        return arrays.shown(dataclasses.replace(spread, part=part), layer.name)

    def _shown(self, arrays: SpreadArrays, x: tf.Tensor, name: str) -> tf.Tensor:
        """Return the array of which ``x`` is a slice along the last axis.

        Args:
            arrays: arrays of this step, which are gathered only if something needs them whole.
            x: the slice.
            name: name of the layer that made it.
        """
        if not arrays.can_be_made:
            return whole_of(self._team, self._along(-1), x, f"columns of {name}")
        axis = x.shape.rank - 1
        return arrays.shown(Spread(x, axis, x.shape[axis] * self._team.size), name)

    def _rows(
        self,
        _: Any,
        layer: Any,
        inputs: Any,
        training: Any = None,
        *,
        cut_along: int,
        arrays: SpreadArrays | None,
    ) -> Any:
        """Return the sum of what the replicas compute from their slices of a layer's input.

        Args:
            layer: the layer.
            inputs: its whole input.
            training: has no meaning here.
            cut_along: the axis of the kernel that is cut.
            arrays: arrays of this step; None if the input is this replica's slice.
        """
        axis = axis_of_input(layer, cut_along)
        with seeing_parts():
            kernel = tf.convert_to_tensor(layer.kernel)
        if arrays is not None:
            spread = arrays.of(inputs) if arrays.can_be_made else None
            if spread is not None and spread.axis == inputs.shape.rank + axis:
                inputs = spread.part
            else:
                inputs = self._along(axis).part(inputs, self._slice())
        x = summed(self._team, product(layer, inputs, kernel), f"rows of {layer.name}")
        return _activated(layer, x if layer.bias is None else keras.ops.add(x, layer.bias))

    def _attention(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(layer, *args, **kwargs)
        if not isinstance(found, tuple):
            return found
        output, scores = found
        along = self._along(axis_of_scores(layer, scores.shape.rank))
        heads = whole_of(self._team, along, scores, f"scores of {layer.name}")
        return output, heads

    def _vocabulary(
        self, original: Any, layer: Any, inputs: Any, *, shown_in: SpreadArrays, **reverse: bool
    ) -> Any:
        if reverse.get("reverse"):
            with seeing_parts():
                logits = original(layer, inputs, **reverse)
            return self._shown(shown_in, logits, layer.name)
        ids, rows = tf.cast(inputs, tf.int32), layer.input_dim
        ids = tf.where(ids < 0, ids + rows, ids)  # Keras counts from the end, too
        ids = losses.inside(ids, rows, _OUTSIDE.format(layer.name))
        with seeing_parts():
            table = tf.convert_to_tensor(layer.embeddings)
        own = ids - self._slice() * table.shape[0]
        held = tf.logical_and(own >= 0, own < table.shape[0])
        rows = tf.gather(table, tf.where(held, own, 0))
        rows = tf.where(held[..., tf.newaxis], rows, tf.zeros_like(rows))
        found = summed(self._team, rows, f"rows of {layer.name}")
        found = keras.ops.cast(found, layer.compute_dtype)
        return with_mask(found, keras.layers.Embedding.compute_mask(layer, inputs))

    def _along(self, axis: int) -> Along:
        return Along(axis, self._team.size)


def seeing_parts() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which this replica reads its parts of weights."""
    return during(dataclasses.replace(this_step(), sees_parts=True))


def _activated(layer: Any, x: tf.Tensor) -> Any:
    return x if layer.activation is None else layer.activation(x)
