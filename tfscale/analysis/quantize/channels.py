"""Channels of a model that can only leave together, and channels that are always zero.

Each channel of each tensor has a number. Layers that act on each channel alone pass the numbers on;
a sum makes those of its inputs equal. So all that must keep or lose a channel together has one
number: the outputs of a convolution, its batch norm, all layers that feed the same residual sums,
and the inputs of those that read them. Layers that nobody knows *pin* their channels: these stay.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import keras
import numpy as np

from tfscale.analysis.quantize import folding, graph

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_TRANSPOSED = (keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose)
_DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
_SEPARABLE = (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
_KEEP_ZERO = ("linear", "relu", "relu6", "tanh", "elu", "selu", "gelu", "silu", "leaky_relu")
_EACH_CHANNEL = (
    "ReLU", "LeakyReLU", "ELU", "Dropout", "SpatialDropout1D", "SpatialDropout2D",
    "SpatialDropout3D", "Identity", "MaxPooling1D", "MaxPooling2D", "MaxPooling3D",
    "AveragePooling1D", "AveragePooling2D", "AveragePooling3D", "GlobalMaxPooling1D",
    "GlobalMaxPooling2D", "GlobalMaxPooling3D", "GlobalAveragePooling1D",
    "GlobalAveragePooling2D", "GlobalAveragePooling3D", "ZeroPadding1D", "ZeroPadding2D",
    "ZeroPadding3D", "Cropping1D", "Cropping2D", "Cropping3D", "UpSampling1D", "UpSampling2D",
    "UpSampling3D",
)  # fmt: skip


class Kernel(NamedTuple):
    """A layer whose outputs are new channels, with the axes of its last kernel.

    Attributes:
        attribute: name of the kernel.
        inputs: axis of the inputs' channels.
        outputs: axis of the outputs' channels.
    """

    attribute: str
    inputs: int
    outputs: int


class Ends(NamedTuple):
    """Numbers of the channels that go into a layer and come out of it."""

    inputs: np.ndarray
    outputs: np.ndarray


class Channels:
    """Numbers of all channels of a model.

    Attributes:
        ends: for each layer that is known, the channels before and after it.
        pinned: numbers of channels that stay.
    """

    def __init__(self, model: Any) -> None:
        graph.check(model)
        self._graph, self._layers = graph.graph_of(model), graph.operations(model)
        self._same: list[int] = []
        self._of_tensor: dict[graph.Tensor, np.ndarray] = {}
        self.ends: dict[str, Ends] = {}
        self.pinned: set[int] = set()
        self._unknown: set[str] = set()  # names of layers all of whose channels stay
        for at in self._graph.inputs:
            of_input = self._layers[at[0]].output if at[0] else model.inputs  # of a Sequential
            (symbol,) = keras.tree.flatten(of_input)
            self._of_tensor[at] = self._pin(self._new(symbol.shape[-1] or 1))
        for call in self._graph.calls:
            self._follow(call)
        for at in self._graph.outputs:
            self._pin(self._of_tensor[at])

    # ------------------------------------------------------------------ numbers

    def _new(self, count: int) -> np.ndarray:
        first = len(self._same)
        self._same += range(first, first + count)
        return np.arange(first, first + count)

    def _pin(self, numbers: np.ndarray) -> np.ndarray:
        self.pinned.update(int(one) for one in numbers)
        return numbers

    def _first(self, number: int) -> int:
        while self._same[number] != number:
            number = self._same[number]
        return number

    def _join(self, some: np.ndarray, others: np.ndarray) -> None:
        for one, other in zip(some, others, strict=True):
            a, b = self._first(int(one)), self._first(int(other))
            self._same[max(a, b)] = min(a, b)

    def resolved(self, numbers: np.ndarray) -> np.ndarray:
        """Return one number for channels that are together."""
        return np.array([self._first(int(one)) for one in numbers], int)

    def stay(self) -> set[int]:
        """Return the resolved numbers of pinned channels."""
        return {self._first(one) for one in self.pinned}

    # ------------------------------------------------------------------ the graph

    def _follow(self, call: graph.Call) -> None:
        layer = self._layers[call.name]
        given = [self._of_tensor[one] for one in call.inputs]
        if call.name in self.ends and len(given) == 1:  # a layer that is called again
            ends = self.ends[call.name]
            if len(given[0]) == len(ends.inputs):
                self._join(given[0], ends.inputs)
                self._of_tensor[call.name, call.number, 0] = ends.outputs
                return
        found = self._outputs(layer, given)
        if found is None:
            self._unknown.add(call.name)
            for each in given:
                self._pin(each)
            for i, each in enumerate(keras.tree.flatten(layer.output)):
                size = each.shape[-1] if len(each.shape) else 1
                self._of_tensor[call.name, call.number, i] = self._pin(self._new(size or 1))
            return
        self._of_tensor[call.name, call.number, 0] = found
        if len(given) == 1:
            self.ends[call.name] = Ends(given[0], found)
        if not keeps_zero(layer):
            self._pin(found)

    def _outputs(self, layer: Any, given: list[np.ndarray]) -> np.ndarray | None:
        kind = type(layer)
        if getattr(layer, "data_format", "channels_last") != "channels_last":
            return None
        if kernel_of(layer) is not None:
            return self._new(int(layer.output.shape[-1]))
        if kind in _DEPTHWISE:
            return np.repeat(given[0], layer.depth_multiplier)
        if kind is keras.layers.BatchNormalization:
            is_last = list(np.atleast_1d(layer.axis) % len(layer.output.shape))
            return given[0] if is_last == [len(layer.output.shape) - 1] and layer.scale else None
        if _combines(layer, given):
            for each in given[1:]:
                self._join(each, given[0])
            return given[0]
        if kind is keras.layers.Concatenate and layer.axis in (-1, len(layer.output.shape) - 1):
            return np.concatenate(given)
        if kind is keras.layers.Flatten:
            return np.tile(given[0], int(layer.output.shape[-1]) // len(given[0]))
        is_alone = kind.__name__ in _EACH_CHANNEL or kind is keras.layers.Activation
        return given[0] if is_alone else None

    # ------------------------------------------------------------------ zeros

    def alive(self) -> set[int]:
        """Return the numbers of channels that are not always zero where they are mixed."""
        zero: dict[graph.Tensor, np.ndarray] = {}
        alive = self.stay()
        for at in self._graph.inputs:
            zero[at] = np.zeros(len(self._of_tensor[at]), bool)
        for call in self._graph.calls:
            layer = self._layers[call.name]
            given = [zero[one] for one in call.inputs]
            if kernel_of(layer) is not None:
                numbers = self.resolved(self._of_tensor[call.inputs[0]])
                alive.update(numbers[~given[0]].tolist())
            is_known = call.name not in self._unknown
            for i in itertools.count():
                at = (call.name, call.number, i)
                if at not in self._of_tensor:
                    break
                count = len(self._of_tensor[at])
                zero[at] = _zeros(layer, given, count) if is_known else np.zeros(count, bool)
        return alive


def kernel_of(layer: Any) -> Kernel | None:
    """Return where the channels of a layer's kernel are, if its outputs are new channels."""
    kind = type(layer)
    if kind is keras.layers.Dense:
        return Kernel("kernel", 0, 1)
    if kind in _CONVOLUTIONS and layer.groups == 1:
        return Kernel("kernel", -2, -1)
    if kind in _TRANSPOSED:
        return Kernel("kernel", -1, -2)
    return Kernel("pointwise_kernel", -2, -1) if kind in _SEPARABLE else None


def _combines(layer: Any, given: list[np.ndarray]) -> bool:
    """Return whether a layer or operation adds or multiplies two or more tensors.

    A number is no input: ``x + 1`` has one input, and is not zero where ``x`` is.
    """
    is_known = type(layer).__name__ in ("Add", "Multiply")
    return is_known and len(given) > 1 and len({len(each) for each in given}) == 1


def keeps_zero(layer: Any) -> bool:
    """Return whether a layer's activation is zero at zero."""
    if type(layer) is keras.layers.ReLU and layer.negative_slope and layer.threshold:
        return False
    activation = getattr(layer, "activation", None)
    return activation is None or getattr(activation, "__name__", "") in _KEEP_ZERO


def _zeros(layer: Any, given: list[np.ndarray], count: int) -> np.ndarray:
    """Return which channels of a layer's output are zero whatever goes in."""
    kind, name = type(layer), type(layer).__name__
    if not keeps_zero(layer):
        return np.zeros(count, bool)
    bias = np.asarray(layer.bias) if getattr(layer, "bias", None) is not None else np.zeros(count)
    if (kernel := kernel_of(layer)) is not None:
        weights = np.moveaxis(np.asarray(getattr(layer, kernel.attribute)), kernel.outputs, 0)
        return np.asarray((weights.reshape(count, -1) == 0).all(1) & (bias == 0))
    if kind in _DEPTHWISE:
        weights = np.asarray(layer.kernel).reshape(-1, count)
        none = (weights == 0).all(0) | np.repeat(given[0], layer.depth_multiplier)
        return np.asarray(none & (bias == 0))
    if kind is keras.layers.BatchNormalization:
        factor, added = folding.factors(layer)
        return np.asarray((given[0] | (factor == 0)) & (added == 0))
    if _combines(layer, given):
        return np.asarray(np.all(given, 0) if name == "Add" else np.any(given, 0))
    if kind is keras.layers.Concatenate and sum(map(len, given)) == count:
        return np.concatenate(given)
    if kind is keras.layers.Flatten:
        return np.tile(given[0], count // len(given[0]))
    is_alone = name in _EACH_CHANNEL or kind is keras.layers.Activation
    return given[0] if is_alone and len(given[0]) == count else np.zeros(count, bool)
