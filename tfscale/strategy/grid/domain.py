"""Layers that compute with slices of images, sequences and volumes: domain parallelism.

A rule such as ``{"conv": "height"}`` names convolutions. Each replica of a team computes its slice
of their outputs, and gets the halo that it needs from its neighbours. Layers behind a convolution
go on with slices if they can. All weights stay copies: a replica has the gradient of its slice, and
the sum over all replicas is that of the whole array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge import hooks, spatial
from tfscale.bridge.layers import activation_is_elementwise, calls_stock_code
from tfscale.bridge.objects import with_operations
from tfscale.bridge.protocols import Layer
from tfscale.bridge.tensorflow import replica_id
from tfscale.exchange.team import Team
from tfscale.parallel.rules import AXES
from tfscale.parallel.windows import (
    Moves,
    Reach,
    Repeated,
    Transposed,
    Window,
    fits,
    others_padding,
    padding_of,
    slices,
)
from tfscale.strategy.grid.collectives import summed
from tfscale.strategy.grid.halo import Spread, by_team, part_of, pieces
from tfscale.strategy.grid.spread import SpreadArrays
from tfscale.strategy.grid.weights import SlicesByRules

_NOT_NAMED = "no rule names it"
_TOO_SMALL = "{size} indices are too few for {ranks} replicas"
_UNKNOWN = "the graph does not know the size of its input"
_OTHER_AXIS = "its input is cut along another axis"


class _Whole(Exception):
    """A layer needs whole arrays; the message says why."""


class SpreadLayers:
    """Layers that compute with slices of arrays, on replicas.

    Args:
        slicing: rules, of which some name axes.
    """

    def __init__(self, slicing: SlicesByRules) -> None:
        self._slicing, self._team = slicing, slicing.team
        self._cut: dict[str, None] = {}
        self._whole: dict[str, str] = {}

    @contextlib.contextmanager
    def computing(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Make these layers compute with slices, on replicas, within this context."""
        if not any(self._slicing.kind_of(layer) in AXES for layer in layers):
            yield
            return
        arrays = SpreadArrays(self._team)
        with contextlib.ExitStack() as stack:
            for each in with_operations(layers):
                kind = spatial.kind_of(each)
                if kind is not None and calls_stock_code(each):
                    call = functools.partial(self._call, arrays, kind)
                    stack.enter_context(hooks.SPLIT_CALL.on(each, call))
            yield
        names = {layer.name for layer in layers}
        for made_by, users in arrays.gather_used().items():
            for user in users:
                self._note_user(made_by, user, names)

    def notes(self) -> list[str]:
        """Return sentences that say which layers compute with slices, and which need whole arrays.

        The list is empty until a step has been traced.
        """
        if not self._cut:
            return []
        found = [f"layers that compute with slices of their outputs: {', '.join(self._cut)}"]
        return found + [f"{name} gets whole arrays: {why}" for name, why in self._whole.items()]

    def _note_user(self, made_by: str, user: str, names: Collection[str]) -> None:
        """Note what uses an array whole: the layer in whose scope an operation was made, if any."""
        scopes = [_without_number(each, names) for each in user.split("/")]
        if "gradient_tape" in scopes:
            return
        known = [each for each in scopes if each in names]
        name = known[-1] if known else user
        self._whole.setdefault(name, f"it reads the output of {made_by}")

    def _call(
        self,
        arrays: SpreadArrays,
        kind: str,
        original: Callable[..., Any],
        layer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not (arrays.can_be_made and args):
            return original(layer, *args, **kwargs)
        axis = self._axis(layer)
        known = [found for x in tf.nest.flatten(args) if (found := arrays.of(x)) is not None]
        if axis is None and not known:
            return original(layer, *args, **kwargs)
        computed = functools.partial(original, layer)
        here = _Here(self._team, arrays, layer, computed, args, kwargs, known)
        try:
            if axis is None and kind in (spatial.CONVOLUTION, spatial.TRANSPOSED):
                raise _Whole(_NOT_NAMED)
            if len({(each.axis, each.size) for each in known}) > 1:
                raise _Whole("its inputs are cut in different ways")
            if self._slicing.kind_of(layer) not in (None, *AXES):
                raise _Whole("its weights are cut")
            found = _KINDS[kind](here, axis if axis is not None else known[0].axis)
        except _Whole as why:
            self._whole[layer.name] = str(why)
            return original(layer, *args, **kwargs)
        self._cut.setdefault(layer.name)
        return arrays.shown(found, layer.name) if isinstance(found, Spread) else found

    def _axis(self, layer: Any) -> int | None:
        """Return the axis along which a rule cuts a layer's output; None if no rule names it."""
        name = self._slicing.kind_of(layer) if isinstance(layer, keras.layers.Layer) else None
        return spatial.axis_named(layer, name) if name in AXES else None


def _without_number(scope: str, names: Collection[str]) -> str:
    """Return the name of a layer from a scope, to which TensorFlow may have added a number."""
    found = re.sub(r"_\d+$", "", scope)
    return found if scope not in names and found in names else scope


@dataclasses.dataclass(frozen=True)
class _Here:
    """A call of a layer on a replica.

    Attributes:
        team: team of the replicas that hold the slices.
        arrays: arrays in slices.
        layer: the layer.
        original: computes what the layer computes.
        args: positional arguments of the call.
        kwargs: other arguments of the call.
        known: the arrays in slices among the arguments.
    """

    team: Team
    arrays: SpreadArrays
    layer: Any
    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    known: list[Spread]

    @property
    def rank(self) -> int:
        return self.team.rank(replica_id())

    @property
    def x(self) -> tf.Tensor:
        return self.args[0]

    @property
    def shape(self) -> list[int | None]:
        spread = self.arrays.of(self.x)
        return list(self.x.shape) if spread is None else spread.shape

    def on(self, part: tf.Tensor) -> tf.Tensor:
        """Return what the layer computes from a slice of its first input."""
        return self.original(part, *self.args[1:], **self.kwargs)

    def own(self, size: int) -> range:
        """Return the indices of an axis of some size that this replica has."""
        return slices(size, self.team.size)[self.rank]

    def spread(self, axis: int) -> Spread:
        """Return the first input, of which this replica has a slice."""
        spread = self.arrays.of(self.x)
        if spread is None or spread.axis != axis:
            raise _Whole(_OTHER_AXIS)
        return spread

    def sizes(self, axes: Sequence[int]) -> list[int]:
        """Return the sizes of axes of the first input."""
        found = [self.shape[axis] for axis in axes]
        known = [size for size in found if size is not None]
        if len(known) < len(found):
            raise _Whole(_UNKNOWN)
        return known

    def needed(self, axis: int, reach: Reach) -> list[tf.Tensor]:
        """Return the inputs that this replica's outputs need, in slices along the axis."""
        if not fits([reach.size, reach.outputs], self.team.size):
            size = min(reach.size, reach.outputs)
            raise _Whole(_TOO_SMALL.format(size=size, ranks=self.team.size))
        moves = Moves.of(reach, self.team.size)
        spread = self.arrays.of(self.x)
        if spread is None:  # each replica has the whole array
            return [part_of(self.x, axis, moves.need[self.rank])]
        if spread.axis != axis:
            raise _Whole(_OTHER_AXIS)
        name = f"halo of {self.layer.name}"
        return pieces(by_team(self.team), moves, self.rank, spread, name)

    def result(self, part: tf.Tensor, axis: int, size: int) -> Spread:
        """Return the layer's output, of which this replica has a slice."""
        part.set_shape([*part.shape[:axis], len(self.own(size)), *part.shape[axis + 1 :]])
        return Spread(part, axis, size)


# ---------------------------------------------------------------------------- windows


def _convolution(here: _Here, axis: int) -> Spread:
    layer = here.layer
    _check_convolution(here, axis)
    windows = _windows(here)
    weights = spatial.weights_of(layer)
    y = _through_windows(here, axis, windows, spatial.unpadded(layer), weights)
    return here.result(_activated(layer, y), axis, windows[axis].outputs)


def _pooling(here: _Here, axis: int) -> Spread:
    windows, compute = _windows(here), spatial.unpadded(here.layer)
    if not spatial.is_pooling_of_means(here.layer):
        y = _through_windows(here, axis, windows, compute, [], here.x.dtype.min)
        return here.result(y, axis, windows[axis].outputs)
    y = _through_windows(here, axis, windows, compute, [])
    for each, window in windows.items():
        outputs = here.own(window.outputs) if each == axis else range(window.outputs)
        real = window.real_places(outputs)
        if set(real) != {window.kernel}:  # padding does not count in a mean
            shape = [-1 if i == each else 1 for i in range(y.shape.rank)]
            factors = tf.constant([window.kernel / number for number in real], y.dtype)
            y = y * tf.reshape(factors, shape)
    return here.result(y, axis, windows[axis].outputs)


def _windows(here: _Here) -> dict[int, Window]:
    axes = spatial.axes_of(here.layer)
    every = zip(axes, here.sizes(axes), spatial.windows_of(here.layer), strict=True)
    return {axis: Window.of(size, **own) for axis, size, own in every}


def _through_windows(
    here: _Here,
    axis: int,
    windows: dict[int, Window],
    compute: Callable[..., tf.Tensor],
    weights: Sequence[tf.Tensor],
    fill: float = 0,
) -> tf.Tensor:
    """Return what this replica computes of a layer's output.

    Args:
        here: the call.
        axis: the axis that is cut.
        windows: a window for each axis that has one.
        compute: computes the output from a padded input and the weights.
        weights: the weights.
        fill: number with which the input is padded.
    """
    came = here.needed(axis, windows[axis])
    padding = [(0, 0)] * here.x.shape.rank
    for each, window in windows.items():
        padding[each] = others_padding(window)
    own = windows[axis].inputs(here.own(windows[axis].outputs))
    padding[axis] = padding_of(own, windows[axis].size)
    return _joined_again(came, axis, padding, fill, compute, weights)


def _joined_again(
    parts: Sequence[tf.Tensor],
    axis: int,
    padding: Sequence[tuple[int, int]],
    fill: float,
    compute: Callable[..., tf.Tensor],
    weights: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Return ``compute`` of slices that are joined and padded, without keeping what is joined.

    The gradient of a convolution needs its input. The slices are in memory anyway, since the layer
    before needs them; the joined array would be a second copy. So the backward pass joins them
    again, when the gradient of the output has come.
    """
    pads = any(map(any, padding))

    def joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
        x = parts[0] if len(parts) == 1 else tf.concat(parts, axis)
        return tf.pad(x, padding, constant_values=tf.constant(fill, x.dtype)) if pads else x

    if len(parts) == 1 and not pads:
        return compute(parts[0], *weights)

    @tf.custom_gradient
    def forward(*given: tf.Tensor) -> Any:
        # A slice may be an array from which others have been sent: its own gradient begins here.
        given = tuple(map(tf.identity, given))
        own, kernels = given[: len(parts)], given[len(parts) :]

        def backward(gradient: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies([gradient]):
                again = joined(own)
            # Nothing uses the output that is computed again, so TensorFlow drops it.
            y = compute(again, *kernels)
            found: list[tf.Tensor] = tf.gradients(
                y, list(given), gradient, unconnected_gradients="zero"
            )
            return found

        return compute(joined(own), *kernels), backward

    return forward(*parts, *weights)


def _transposed(here: _Here, axis: int) -> Spread:
    layer, axes = here.layer, spatial.axes_of(here.layer)
    _check_convolution(here, axis)
    every = zip(axes, here.sizes(axes), spatial.windows_of(layer), strict=True)
    reaches = {
        each: Transposed(size, own["kernel"], own["stride"], own["padding"])
        for each, size, own in every
    }
    came, nothing = here.needed(axis, reaches[axis]), [(0, 0)] * here.x.shape.rank
    weights = spatial.weights_of(layer)
    y = _joined_again(came, axis, nothing, 0, spatial.unpadded(layer), weights)
    for each, reach in reaches.items():
        outputs = here.own(reach.outputs) if each == axis else range(reach.outputs)
        first = reach.cut_off(outputs)
        y = part_of(y, each, range(first, first + len(outputs)))
    return here.result(_activated(layer, y), axis, reaches[axis].outputs)


def _check_convolution(here: _Here, axis: int) -> None:
    if why := spatial.why_whole(here.layer):
        raise _Whole(why)
    _check_activation(here.layer, axis, here.x.shape.rank)


def _activated(layer: Any, y: tf.Tensor) -> tf.Tensor:
    y = spatial.with_bias(layer, y)
    return y if layer.activation is None else layer.activation(y)


def _check_activation(layer: Any, axis: int, rank: int) -> None:
    is_softmax = getattr(layer, "activation", None) is keras.activations.softmax
    if not (activation_is_elementwise(layer) or (is_softmax and axis != rank - 1)):
        raise _Whole("its activation may need whole arrays")


# ------------------------------------------------------------------ sizes that change


def _upsampling(here: _Here, axis: int) -> Spread:
    axes, times = spatial.axes_of(here.layer), spatial.times_of(here.layer)
    if times is None:
        raise _Whole("it interpolates")
    reach = Repeated(here.sizes([axis])[0], times[axes.index(axis)])
    y = here.on(tf.concat(here.needed(axis, reach), axis))
    first = reach.cut_off(own := here.own(reach.outputs))
    return here.result(part_of(y, axis, range(first, first + len(own))), axis, reach.outputs)


def _margins(here: _Here, axis: int) -> Spread:
    """Return the slice of an array that gets margins, or loses them."""
    axes = spatial.axes_of(here.layer)
    sizes, margins = here.sizes(axes), spatial.margins_of(here.layer)
    windows = {
        each: Window(size, size + sum(pair), before=pair[0])
        for each, size, pair in zip(axes, sizes, margins, strict=True)
    }
    x = tf.concat(here.needed(axis, windows[axis]), axis)
    padding = [(0, 0)] * x.shape.rank
    for each, window in windows.items():
        if each == axis:
            needed = window.inputs(here.own(window.outputs))
            padding[each] = padding_of(needed, window.size)
            continue
        before, after = margins[axes.index(each)]
        x = part_of(x, each, range(max(0, -before), window.size + min(0, after)))
        padding[each] = (max(0, before), max(0, after))
    return here.result(tf.pad(x, padding), axis, windows[axis].outputs)


def _mean(here: _Here, axis: int) -> tf.Tensor:
    spread, axes = here.spread(axis), spatial.axes_of(here.layer)
    if here.args[1:] or here.kwargs.get("mask") is not None:
        raise _Whole("it gets a mask")
    number = math.prod(here.sizes(axes))
    part = spread.part
    precise = part if part.dtype == tf.float64 else tf.cast(part, tf.float32)
    own = tf.reduce_sum(precise, axes, keepdims=here.layer.keepdims)
    mean = summed(here.team, own / number, f"mean of {here.layer.name}")
    return tf.cast(mean, part.dtype)


# ----------------------------------------------------------------- sizes that stay


def _elementwise(here: _Here, axis: int) -> Spread:
    spread = here.spread(axis)
    _check_activation(here.layer, axis, spread.part.shape.rank)
    return dataclasses.replace(spread, part=here.on(spread.part))


def _along_channels(here: _Here, axis: int) -> Spread:
    spread = here.spread(axis)
    rank = spread.part.shape.rank
    if axis in spatial.axes_that_mix(here.layer, rank):
        raise _Whole("it needs all numbers along the axis that is cut")
    _check_activation(here.layer, axis, rank)
    return dataclasses.replace(spread, part=here.on(spread.part))


def _norm(here: _Here, axis: int) -> Spread:
    spread, layer = here.spread(axis), here.layer
    training = here.kwargs.get("training", here.args[1] if len(here.args) > 1 else None)
    sums = bool(hooks.MOMENTS.replacements(layer))
    if training is not None and training is not False and not sums and layer.trainable:
        raise _Whole("its statistics are those of one replica")
    if getattr(layer, "renorm", False) or layer.axis % spread.part.shape.rank == axis:
        raise _Whole("it normalizes in another way")
    if here.kwargs.get("mask") is not None:
        raise _Whole("it gets a mask")
    return dataclasses.replace(spread, part=here.on(spread.part))


def _dropout(here: _Here, axis: int) -> Spread:
    """Return the slice of what is left of an array; one device would drop the same numbers."""
    spread = here.spread(axis)
    shape = [tf.shape(spread.part)[i] if n is None else n for i, n in enumerate(spread.shape)]
    ones = tf.ones(tf.stack(shape), spread.part.dtype)
    left = here.on(tf.ensure_shape(ones, spread.shape))
    if left is ones:
        return spread
    return dataclasses.replace(
        spread, part=spread.part * part_of(left, axis, here.own(spread.size))
    )


def _merge(here: _Here, axis: int) -> Spread:
    return _aligned(here, axis, broadcasts=True)


def _join(here: _Here, axis: int) -> Spread:
    if spatial.axis_of_join(here.layer, here.known[0].part.shape.rank) == axis:
        raise _Whole("it joins arrays along the axis that is cut")
    return _aligned(here, axis, broadcasts=False)


def _aligned(here: _Here, axis: int, broadcasts: bool) -> Spread:
    """Return the slice of what an operation makes of several arrays of the same indices.

    Args:
        here: the call.
        axis: the axis that is cut.
        broadcasts: whether the operation repeats what has one index only, or none.
    """
    size, rank = here.known[0].size, here.known[0].part.shape.rank

    def own(x: Any) -> Any:
        spread = here.arrays.of(x)
        if spread is not None and spread.part.shape.rank == rank:
            return spread.part
        shape = getattr(x, "shape", ())
        if spread is not None or getattr(shape, "rank", 0) is None or len(shape) > rank:
            raise _Whole("its inputs have different shapes")
        place = axis - (rank - len(shape))
        if broadcasts and (place < 0 or shape[place] == 1):
            return x
        if place < 0 or shape[place] != size:
            raise _Whole("its inputs have different shapes")
        return part_of(tf.convert_to_tensor(x), place, here.own(size))

    part = here.original(*tf.nest.map_structure(own, here.args), **here.kwargs)
    return Spread(part, axis, size)


_KINDS: dict[str, Callable[[_Here, int], Any]] = {
    spatial.CONVOLUTION: _convolution,
    spatial.TRANSPOSED: _transposed,
    spatial.POOLING: _pooling,
    spatial.UPSAMPLING: _upsampling,
    spatial.PADDING: _margins,
    spatial.CROPPING: _margins,
    spatial.MEAN: _mean,
    spatial.ELEMENTWISE: _elementwise,
    spatial.CHANNELS: _along_channels,
    spatial.NORM: _norm,
    spatial.DROPOUT: _dropout,
    spatial.MERGE: _merge,
    spatial.JOIN: _join,
}
