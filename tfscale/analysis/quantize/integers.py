"""An execution of a quantized model by whole numbers alone, in NumPy.

It shows that the model can be deployed on hardware without real numbers: each layer multiplies
integers, adds them up in 32 bits, and rescales the sums by a product and a shift. The results are
those of the model's own inference, bit by bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfscale.analysis.quantize import dyadic, graph, windows
from tfscale.analysis.quantize.grid import Grid
from tfscale.bridge.installed import refuse_keras_2
from tfscale.support import arguments

_INT32 = 2**31
_EXACT_SUM = 2**24  # whole numbers that float32 holds, in the model's own additions
_RESHAPES = ("Flatten", "Reshape")
_SAME = (
    "Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "GaussianDropout",
    "GaussianNoise", "Identity",
)  # fmt: skip
_SMOOTH = ("softmax", "sigmoid", "tanh", "log_softmax")

Operation = Callable[[list[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Integers:
    """A quantized model as a program of whole numbers.

    Attributes:
        step: step of the grid on which numbers travel between layers, a power of two.
        bytes: size of all kernels at their bits, with biases and factors of 32 bits.
    """

    step: float
    bytes: int
    _calls: tuple[tuple[graph.Call, Operation], ...] = dataclasses.field(repr=False)
    _graph: graph.Graph = dataclasses.field(repr=False)
    _names: graph.Names = dataclasses.field(repr=False)

    def run(self, x: Any) -> Any:
        """Return the model's outputs, before a last softmax, sigmoid or tanh, as float32.

        Args:
            x: an array of inputs, or a list of arrays, or a dict of arrays if the model takes one.
        """
        found = self.run_integers(x)
        real = [np.asarray(each * self.step, np.float32) for each in found]
        if self._names.outputs:
            return dict(zip(self._names.outputs, real, strict=True))
        return real[0] if len(real) == 1 else real

    def run_integers(self, x: Any) -> list[np.ndarray]:
        """Return the outputs as whole numbers of the grid.

        Args:
            x: an array of inputs, or a list of arrays, or a dict of arrays if the model takes one.
        """
        arguments.data(x, "x")
        if names := self._names.inputs:
            x = self._in_order(x, names)
        given = [np.asarray(each) for each in (x if isinstance(x, (list, tuple)) else [x])]
        if len(given) != len(self._graph.inputs):
            raise arguments.wrong(x, "x", f"{len(self._graph.inputs)} arrays of inputs")
        values = {at: self._entered(each) for at, each in zip(self._graph.inputs, given)}
        for call, operation in self._calls:
            values[call.name, call.number, 0] = operation([values[one] for one in call.inputs])
        return [values[one] for one in self._graph.outputs]

    def _in_order(self, x: Any, names: tuple[str, ...]) -> list[Any]:
        given = x if isinstance(x, Mapping) else {}
        if not set(names) <= set(given):
            raise arguments.wrong(x, "x", f"a dict of arrays with the keys {', '.join(names)}")
        return [given[name] for name in names]

    def _entered(self, x: np.ndarray) -> np.ndarray:
        given = x.astype(np.float32).astype(np.float64)  # Keras casts inputs to float32
        return clipped(np.floor(given / self.step + 0.5).astype(np.int64))


def integers(model: Any) -> Integers:
    r"""Return a quantized model as a program of whole numbers.

    A layer has inputs :math:`x = s_x (q_x - z_x)` and weights :math:`w = s_w (q_w - z_w)`, and
    computes

    .. math::
        a = \sum (q_x - z_x)(q_w - z_w), \quad y = \lfloor a \, b \, 2^{-c} + 1/2 \rfloor + \beta

    where :math:`a` has 32 bits, and :math:`b \, 2^{-c}`, with :math:`b` of 20 bits, is next to
    :math:`s_x s_w / s`. :math:`s` is the step of a grid, a power of two, on which numbers travel
    between layers, and :math:`\beta` is the bias on the grid. Additions add numbers of the grid.

    The model knows Dense, EinsumDense, convolutions but for transposed ones, pooling, additions,
    concatenations, ReLU with and without a maximum, reshapes and padding, and a last softmax,
    sigmoid or tanh, which is left out.

    Args:
        model: a model of ``quantize.apply`` that was given ``x``; all its layers with weights have
            few bits.

    Example:
        >>> import numpy as np
        >>> from tfscale import quantize
        >>> plain = keras.Sequential([keras.Input([8]), keras.layers.Dense(4, "relu", name="one"),
        ...                           keras.layers.Dense(2, name="two")])
        >>> small = quantize.apply(plain, {"one": 8, "two": 4}, x)
        >>> program = quantize.integers(small)
        >>> bool(np.all(program.run(x) == small.predict(x, verbose=0)))
        True

    Reference: Yao et al., HAWQ-V3: Dyadic Neural Network Quantization,
        https://arxiv.org/abs/2011.10680.
    """
    refuse_keras_2("quantize.integers reads layers of Keras 3")
    graph.check(model)
    read = graph.graph_of(model)
    steps = {float(np.asarray(each.grid.step)) for each in model.layers if _has_grid(each)}
    if len(steps) != 1:
        raise ValueError(
            f"model {model.name!r} has {len(steps)} grids on which numbers travel; expected one. "
            "Give quantize.apply x=, some samples, and quantize all layers at once"
        )
    read_on = {name for call in read.calls for name, _, _ in call.inputs}
    (step,), last = steps, {name for name, _, _ in read.outputs} - read_on
    by_name = graph.operations(model)
    called = {call.name for call in read.calls}
    _refuse_other_types(model, [by_name[name] for name in sorted(called)])
    for call in read.calls:
        if type(by_name[call.name]).__name__ in ("Add", "Concatenate") and len(call.inputs) < 2:
            raise ValueError(_unknown(by_name[call.name], "an operation with a constant"))
    made = {name: _operation(by_name[name], name in last, step) for name in sorted(called)}
    calls = tuple((call, made[call.name]) for call in read.calls)
    return Integers(
        step, sum(_bytes(layer) for layer in model.layers), calls, read, graph.names_of(model)
    )


def _refuse_other_types(model: Any, operations: Sequence[Any]) -> None:
    """Raise if an operation computes in a type whose numbers are not those of the grid."""
    types = {each.name: getattr(each, "compute_dtype", "float32") for each in operations}
    others = [f"{name!r} in {kind}" for name, kind in types.items() if kind != "float32"]
    if others:
        raise ValueError(
            f"model {model.name!r} computes {', '.join(others[:5])}"
            f"{', ...' if len(others) > 5 else ''}, and whole numbers equal those of float32 only: "
            "build the model with the policy float32, set_weights(), and quantize that one"
        )


def _has_grid(layer: Any) -> bool:
    return isinstance(getattr(layer, "grid", None), Grid)


def _bytes(layer: Any) -> int:
    """Return the bytes of a layer's weights at their bits, and of its factors and biases."""
    if not hasattr(layer, "kernel_quantizers"):
        return 0
    found = 4 * layer.bias.shape[0] if layer.has_bias() else 0
    for quantizer, stage in zip(layer.kernel_quantizers, layer.stages(), strict=True):
        count = int(np.prod(getattr(layer, stage.kernel).shape))
        found += -(-count * quantizer.bits // 8) + 4 * int(quantizer.scale.shape[0])
    return found


def clipped(whole: np.ndarray) -> np.ndarray:
    """Return whole numbers within what the grid holds."""
    most = int(dyadic.LARGEST_ON_GRID)
    return np.asarray(np.clip(whole, -most, most))


def _operation(layer: Any, is_last: bool, step: float) -> Operation:
    """Return what a layer does with whole numbers."""
    kind = type(layer).__name__
    if hasattr(layer, "kernel_quantizers"):
        return _linear(layer, is_last, step)
    if _has_grid(layer) or kind.startswith(("MaxPooling", "GlobalMaxPooling")):
        return windows.pooling(layer)
    if kind == "Add":
        if len({len(each.shape) for each in keras.tree.flatten(layer.input)}) > 1:
            raise ValueError(_unknown(layer, "a sum of arrays with different numbers of axes"))
        return _sum
    if kind == "Concatenate":
        return lambda given: np.concatenate(given, layer.axis)
    if kind.startswith("ZeroPadding"):
        return lambda given: windows.padded(layer, given[0])
    if kind == "Flatten" and layer.data_format == "channels_first":  # Keras puts channels last
        return lambda given: np.moveaxis(given[0], 1, -1).reshape(len(given[0]), -1)
    if kind in _RESHAPES and hasattr(layer, "compute_output_shape"):
        return lambda given: given[0].reshape(layer.compute_output_shape(given[0].shape))
    if kind == "Permute":
        return lambda given: np.transpose(given[0], (0, *layer.dims))
    if kind in _SAME:
        return lambda given: given[0]
    if kind == "ReLU" and not (layer.negative_slope or layer.threshold):
        return _unary(_bounded(layer.max_value, step, layer))
    if kind == "Activation":
        return _unary(_activation(layer, is_last, step))
    raise ValueError(_unknown(layer, kind))


def _unknown(layer: Any, what: str) -> str:
    return (
        f"{layer.name!r} is {what}, which integers do not compute; they compute Dense, "
        "EinsumDense, convolutions, pooling, Add, Concatenate, ReLU, reshapes, padding, and a last "
        "softmax, sigmoid or tanh. Give layers with weights bits in the plan"
    )


def _unary(function: Callable[[np.ndarray], np.ndarray]) -> Operation:
    return lambda given: function(given[0])


def _sum(given: list[np.ndarray]) -> np.ndarray:
    total = functools.reduce(np.add, given)
    if np.abs(total).max(initial=0) > _EXACT_SUM:
        raise OverflowError(
            "an addition exceeds the grid on which numbers travel between layers: some inputs are "
            "far larger than those that quantize.apply was given. Give it x= with such inputs"
        )
    return np.asarray(total)


def _bounded(most: float | None, step: float, layer: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return ReLU, with a maximum or without."""
    if most is None:
        return lambda x: np.maximum(x, 0)
    whole = most / step
    if whole != int(whole):
        raise ValueError(_unknown(layer, f"ReLU with a maximum of {most}, not on the grid"))
    return lambda x: np.clip(x, 0, int(whole))


def _activation(layer: Any, is_last: bool, step: float) -> Callable[[np.ndarray], np.ndarray]:
    name = getattr(layer.activation, "__name__", "linear")
    if name == "linear" or (is_last and name in _SMOOTH):
        return lambda x: x
    if name in ("relu", "relu6"):
        return _bounded(6.0 if name == "relu6" else None, step, layer)
    raise ValueError(_unknown(layer, f"a layer with the activation {name!r}"))


def _linear(layer: Any, is_last: bool, step: float) -> Operation:
    """Return the products, sums and rescalings of a layer."""
    if not layer.input_quantizers:
        raise ValueError(
            f"the inputs of {layer.name!r} are not quantized: give quantize.apply x=, some "
            "samples, and the layer bits of activations"
        )
    stages = [_Stage.of(layer, i, step) for i in range(len(layer.stages()))]
    activation = _activation(layer, is_last, step)
    bias = None
    if layer.has_bias():
        bias = np.asarray(layer.along_channels(layer.grid.enter(layer.bias))).astype(np.int64)

    def run(given: list[np.ndarray]) -> np.ndarray:
        x = given[0]
        for stage in stages:
            x = stage.run(clipped(x))
        return activation(x if bias is None else clipped(x + bias))

    return run


class _Stage(NamedTuple):
    """One product of a layer: from the grid to few bits, sums in 32 bits, and back to the grid."""

    entering: tuple[np.ndarray, np.ndarray]
    zero: int
    limits: tuple[int, int]
    product: Callable[[np.ndarray, np.ndarray], np.ndarray]
    kernel: np.ndarray
    leaving: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, layer: Any, i: int, step: float) -> _Stage:
        """Read a stage of a layer."""
        stage = layer.stages()[i]
        inputs, kernels = layer.input_quantizers[i], layer.kernel_quantizers[i]
        kernel = np.asarray(kernels.integers(getattr(layer, stage.kernel))).astype(np.int32)
        axes = tuple(axis % kernel.ndim for axis in stage.axes)
        others = tuple(axis for axis in range(kernel.ndim) if axis not in axes)
        low, high = inputs.limits
        zero = int(np.asarray(inputs.zeros()))
        most = int(np.abs(kernel.astype(np.int64)).sum(others).max()) * max(high - zero, zero - low)
        if most >= _INT32:
            raise ValueError(
                f"sums of {layer.name!r} reach {most:,}, which does not fit into 32 bits: give it "
                "fewer bits"
            )
        entering = dyadic.dyadic(np.float64(step) / np.asarray(inputs.scales(), np.float64))
        leaving = dyadic.dyadic(np.asarray(layer.output_factor(i, np.float32(step))))
        product = windows.product(layer, i)
        return cls(entering, zero, inputs.limits, product, kernel, leaving)

    def run(self, x: np.ndarray) -> np.ndarray:
        """Multiply and add."""
        few = np.clip(dyadic.rescaled(x, self.entering) + self.zero, *self.limits) - self.zero
        sums = self.product(few.astype(np.int32), self.kernel)
        return clipped(dyadic.rescaled(sums, self.leaving))
