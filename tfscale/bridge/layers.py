"""Keras's own layers: how their weights can be cut, and what computes with their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.calls import caller
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.protocols import Layer

# Operations that compute each number of their result from the number at the same place.
ELEMENTWISE_LAYERS = ("Activation", "Dropout", "ELU", "LeakyReLU", "ReLU")
ELEMENTWISE_OPERATIONS = (
    *("Celu", "Elu", "Gelu", "HardSigmoid", "HardSilu", "HardTanh", "LeakyRelu", "Relu", "Relu6"),
    *("Selu", "Sigmoid", "Silu", "Softplus", "Softsign", "SquarePlus", "Tanh", "TanhShrink"),
)
_ELEMENTWISE_FUNCTIONS = (
    *("celu", "elu", "exponential", "gelu", "hard_sigmoid", "hard_silu", "hard_tanh"),
    *("leaky_relu", "linear", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus"),
    *("softsign", "swish", "tanh", "tanh_shrink"),
)


# Convolutions each of whose channels needs all channels of the input.
CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D")

# Layers that compute each channel by itself, if channels lie last.
_PER_CHANNEL = tuple(
    f"{name}{number}D"
    for name in ("MaxPooling", "AveragePooling", "UpSampling", "ZeroPadding", "Cropping")
    for number in (1, 2, 3)
)


def variable_being_made() -> Any:
    """Return the Keras variable whose value TensorFlow makes now; None for others."""
    if KERAS_2:
        return None
    found = caller(keras.Variable)
    return found if found is not None and getattr(found, "_value", None) is None else None


def layer_that_makes(variable: Any) -> Any:
    """Return the layer that makes a variable now; None if something else makes it.

    Keras makes the weights of a subclassed model together, after it has called the model on
    symbols; then the layer is one of the model's layers.
    """
    found = caller((keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric))
    if not isinstance(found, keras.layers.Layer):
        return None
    return next((each for each in found._flatten_layers() if _has_own(each, variable)), found)


def _has_own(layer: Layer, variable: Any) -> bool:
    return any(own is variable for own in getattr(layer, "_trainable_variables", ()))


def stock_layer(layer: Layer, names: Sequence[str]) -> Any:
    """Return the layer of one of Keras's classes to which a weight of ``layer`` belongs, or None.

    Args:
        layer: the layer that makes the weight.
        names: names of classes. An attention's weights are made by its projections.
    """
    if type(layer).__name__ in names and is_keras(type(layer)):
        return layer
    kinds = tuple(kind for kind in ATTENTIONS if kind.__name__ in names)
    if not kinds:
        return None
    outermost = caller(keras.layers.Layer)
    every = [caller(kinds), *(outermost._flatten_layers() if outermost is not None else ())]
    return next((each for each in every if type(each) in kinds and _projects(each, layer)), None)


def _projects(attention: Any, layer: Layer) -> bool:
    """Return whether a layer is a projection of an attention."""
    return any(layer is each for each in vars(attention).values())


ATTENTIONS = tuple(
    getattr(keras.layers, name)
    for name in ("MultiHeadAttention", "GroupQueryAttention")
    if hasattr(keras.layers, name)
)


def is_keras(kind: type) -> bool:
    """Return whether a class is one of Keras."""
    return kind.__module__.split(".")[0] == "keras"


def calls_stock_code(layer: Layer) -> bool:
    """Return whether a layer computes as its class in Keras does, with its weights as they are."""
    has_more = getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None)
    return is_keras(type(layer)) and not has_more and not hooks.is_assigned(layer, "call")


# ---------------------------------------------------------------------- attention

_PROJECTIONS = ("query", "key", "value", "gate")


def projections_of(attention: Layer) -> list[Any]:
    """Return the projections of an attention's query, key and value, and of its gate, if any."""
    names = [f"_{name}_dense" for name in _PROJECTIONS]
    return [getattr(attention, name) for name in names if hasattr(attention, name)]


def output_projection_of(attention: Layer) -> Any:
    """Return the projection of an attention's output."""
    return attention._output_dense  # type: ignore[attr-defined]


def axis_of_scores(attention: Layer, rank: int) -> int:
    """Return the axis of heads of an attention's scores, which are of this rank."""
    return rank - 1 - 2 * len(getattr(attention, "_attention_axes", None) or (1,))


def dropout_of(attention: Layer) -> Any:
    """Return the layer that drops an attention's weights."""
    return attention._dropout_layer  # type: ignore[attr-defined]


def axis_of_heads(path: str) -> dict[str, int]:
    """Return the axes of heads of an attention's weights, by name, for a weight's path."""
    projection = path.split("/")[-2]
    if projection in _PROJECTIONS:
        return {"kernel": 1, "bias": 0}
    return {"kernel": 0} if projection == "attention_output" else {}


# ------------------------------------------------------------------------- dense


def axes_of_columns(layer: Layer) -> dict[str, int]:
    """Return the axes of a layer's weights that belong to the last axis of its output.

    There are none if an einsum takes that axis from its input.
    """
    if _is_convolution(layer):
        return {"kernel": layer.rank + 1, "bias": 0}  # type: ignore[attr-defined]
    if type(layer).__name__ == "Dense":
        return {"kernel": 1, "bias": 0}
    _, kernel, output = _labels(layer)
    last = output[-1]
    axes = {"kernel": kernel.index(last)} if last in kernel else {}
    bias = getattr(layer, "bias_axes", None)
    return axes | ({"bias": _place_in_bias(bias, output)} if axes and bias and last in bias else {})


def _place_in_bias(bias: str, output: str) -> int:
    """Return the axis of a bias along which its last label lies."""
    held = [label for label in output if label in bias]
    first = min(output.index(label) for label in held)
    return len(output) - first - 1


def axes_of_rows(layer: Layer) -> dict[str, int]:
    """Return the axis of a layer's kernel that is summed over; none if there are several."""
    if _is_convolution(layer):
        return {"kernel": layer.rank}  # type: ignore[attr-defined]
    if type(layer).__name__ == "Dense":
        return {"kernel": 0}
    _, kernel, output = _labels(layer)
    summed = [axis for axis, label in enumerate(kernel) if label not in output]
    return {"kernel": summed[0]} if len(summed) == 1 else {}


def axis_of_input(layer: Layer, axis: int) -> int:
    """Return the axis of a layer's input, from the end, that belongs to one of its kernel."""
    if type(layer).__name__ == "Dense" or _is_convolution(layer):
        return -1
    inputs, kernel, _ = _labels(layer)
    return inputs.index(kernel[axis]) - len(inputs)


def _labels(layer: Layer) -> tuple[str, str, str]:
    equation: str = layer.equation  # type: ignore[attr-defined]
    inputs, output = equation.replace(" ", "").split("->")
    given, kernel = inputs.split(",")
    return given.replace("...", "."), kernel, output.replace("...", ".")


def product(layer: Layer, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Return a layer's product of its input and a kernel: for a convolution, what it computes."""
    if _is_convolution(layer):
        return _convolved(layer, inputs, kernel)
    if type(layer).__name__ == "Dense":
        return keras.ops.matmul(inputs, kernel)
    return keras.ops.einsum(layer.equation, inputs, kernel)  # type: ignore[attr-defined]


def _is_convolution(layer: Layer) -> bool:
    return type(layer).__name__ in CONVOLUTIONS


def _convolved(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    padding = layer.padding
    if padding == "causal":
        wide = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
        inputs, padding = keras.ops.pad(inputs, [[0, 0], [wide, 0], [0, 0]]), "valid"
    strides, dilation = list(layer.strides), layer.dilation_rate
    return keras.ops.conv(inputs, kernel, strides, padding, layer.data_format, dilation)


def channels_can_be_cut(layer: Any) -> bool:
    """Return whether each channel of a layer's output needs all channels of its input, lying last.

    Layers other than convolutions have units instead of channels, which lie last.
    """
    if not _is_convolution(layer):
        return True
    return bool(layer.groups == 1 and layer.data_format == "channels_last")


def activation_is_elementwise(layer: Layer) -> bool:
    """Return whether a layer's activation computes each number by itself."""
    activation: Any = getattr(layer, "activation", None)
    if activation is None:
        return True
    name = getattr(activation, "__name__", "")
    return name in _ELEMENTWISE_FUNCTIONS and activation is getattr(keras.activations, name, None)


def is_elementwise(operation: Any) -> bool:
    """Return whether an operation computes each index of the last axis by itself."""
    name = type(operation).__name__
    if not is_keras(type(operation)):
        return False
    if getattr(operation, "noise_shape", None) is not None:
        return False  # it drops the numbers of some indices together
    if name in ELEMENTWISE_LAYERS:
        return activation_is_elementwise(operation)
    if name in _PER_CHANNEL:
        return getattr(operation, "data_format", "channels_last") == "channels_last"
    return name in ELEMENTWISE_OPERATIONS
