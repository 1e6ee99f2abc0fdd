"""Keras's layers of images, sequences and volumes: their axes, windows and computations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.layers import ELEMENTWISE_LAYERS, ELEMENTWISE_OPERATIONS, is_keras

DIMENSIONS = {
    "length": ("1D",),
    "height": ("2D", "3D"),
    "width": ("2D", "3D"),
    "depth": ("3D",),
}
_NAMES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}

# Kinds of layers and of operations, by what they need of an axis that is cut.
CONVOLUTION, TRANSPOSED, POOLING, UPSAMPLING, PADDING, CROPPING, MEAN = (
    *("convolution", "transposed convolution", "pooling", "upsampling", "padding", "cropping"),
    "mean",
)
ELEMENTWISE, MERGE, JOIN, NORM, DROPOUT, CHANNELS = (
    *("elementwise", "merge", "join", "batch normalization", "dropout", "channels"),
)

_DIMENSIONED = {
    "Conv": CONVOLUTION,
    "DepthwiseConv": CONVOLUTION,
    "SeparableConv": CONVOLUTION,
    "MaxPooling": POOLING,
    "AveragePooling": POOLING,
    "UpSampling": UPSAMPLING,
    "ZeroPadding": PADDING,
    "Cropping": CROPPING,
    "GlobalAveragePooling": MEAN,
    "SpatialDropout": ELEMENTWISE,
}
_LAYERS = {
    **{f"{name}{n}D": kind for name, kind in _DIMENSIONED.items() for n in (1, 2, 3)},
    **{f"Conv{n}DTranspose": TRANSPOSED for n in (1, 2, 3)},
    **dict.fromkeys(ELEMENTWISE_LAYERS, ELEMENTWISE),
    **dict.fromkeys(("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum"), MERGE),
    "Concatenate": JOIN,
    "BatchNormalization": NORM,
    "Dropout": DROPOUT,
    **dict.fromkeys(("Dense", "LayerNormalization", "Softmax"), CHANNELS),
}
_OPERATIONS = {
    **dict.fromkeys(ELEMENTWISE_OPERATIONS, ELEMENTWISE),
    **dict.fromkeys(("Add", "Subtract", "Multiply", "Maximum", "Minimum"), MERGE),
    **dict.fromkeys(("Divide", "TrueDivide", "Negative", "Square", "Exp"), MERGE),
    "Concatenate": JOIN,
}


def kind_of(operation: Any) -> str | None:
    """Return the kind of a layer or an operation of Keras; None for others."""
    if not is_keras(type(operation)):
        return None
    names = _LAYERS if isinstance(operation, keras.layers.Layer) else _OPERATIONS
    return names.get(type(operation).__name__)


def convolutions(axis: str) -> tuple[str, ...]:
    """Return the names of the convolutions that have an axis."""
    ends = DIMENSIONS[axis]
    names = [name for name, kind in _LAYERS.items() if kind in (CONVOLUTION, TRANSPOSED)]
    found = [name for name in names if name.removesuffix("Transpose").endswith(ends)]
    return tuple(name for name in found if hasattr(keras.layers, name))


def axes_of(layer: Any) -> list[int]:
    """Return the axes of a layer's input that are neither the batch nor the channels."""
    number = int(type(layer).__name__.removesuffix("Transpose")[-2])
    first = 2 if getattr(layer, "data_format", None) == "channels_first" else 1
    return list(range(first, first + number))


def axis_named(layer: Any, name: str) -> int:
    """Return the axis of a layer's input that has a name, such as ``"height"``."""
    axes = axes_of(layer)
    return axes[_NAMES[len(axes)].index(name)]


def channels_of(layer: Any, rank: int) -> int:
    """Return the axis of channels of a layer's input of a rank."""
    return 1 if getattr(layer, "data_format", None) == "channels_first" else rank - 1


def windows_of(layer: Any) -> list[dict[str, Any]]:
    """Return for each axis the kernel, the stride, the dilation and the padding of a window."""
    kernel = layer.pool_size if hasattr(layer, "pool_size") else layer.kernel_size
    dilation = _each(getattr(layer, "dilation_rate", 1), len(kernel))
    return [
        {"kernel": k, "stride": s, "dilation": d, "padding": layer.padding}
        for k, s, d in zip(kernel, _each(layer.strides, len(kernel)), dilation, strict=True)
    ]


def margins_of(layer: Any) -> list[tuple[int, int]]:
    """Return for each axis how much is added, or cut off if negative, before and after it."""
    own, sign = (layer.cropping, -1) if hasattr(layer, "cropping") else (layer.padding, 1)
    pairs = [own] if isinstance(own[0], int) else own
    return [(sign * before, sign * after) for before, after in pairs]


def times_of(layer: Any) -> list[int] | None:
    """Return how often an upsampling layer repeats each index of each axis; None if it doesn't."""
    if getattr(layer, "interpolation", "nearest") != "nearest":
        return None
    return list(_each(layer.size, len(axes_of(layer))))


def why_whole(layer: Any) -> str | None:
    """Return why a convolution computes with whole arrays only; None if it need not."""
    dilated = any(d > 1 for d in _each(getattr(layer, "dilation_rate", 1), 1))
    if getattr(layer, "groups", 1) > 1:
        return "XLA compiles its groups"
    if type(layer).__name__.endswith("Transpose") and (dilated or layer.output_padding is not None):
        return "it is transposed with a dilation or an output padding"
    return None


def weights_of(layer: Any) -> list[tf.Tensor]:
    """Return the kernels of a convolution, in the precision in which it computes."""
    if type(layer).__name__.startswith("Separable"):
        kernels = [layer.depthwise_kernel, layer.pointwise_kernel]
    else:
        kernels = [layer.kernel]
    return [keras.ops.convert_to_tensor(kernel) for kernel in kernels]


def unpadded(layer: Any) -> Callable[..., tf.Tensor]:
    """Return what a layer computes from an input that is padded already, and from its kernels."""
    name = type(layer).__name__
    more = {"strides": layer.strides, "padding": "valid", "data_format": layer.data_format}
    if kind_of(layer) == POOLING:
        pool = keras.ops.max_pool if name.startswith("Max") else keras.ops.average_pool
        return lambda x: pool(x, layer.pool_size, **more)
    more["strides"] = _each(layer.strides, len(layer.kernel_size))
    more["dilation_rate"] = layer.dilation_rate
    if name.endswith("Transpose"):
        return lambda x, kernel: keras.ops.conv_transpose(x, kernel, **more)
    if name.startswith("Separable"):
        return lambda x, depthwise, pointwise: keras.ops.separable_conv(
            x, depthwise, pointwise, **more
        )
    convolve = keras.ops.depthwise_conv if name.startswith("Depthwise") else keras.ops.conv
    return lambda x, kernel: convolve(x, kernel, **more)


def with_bias(layer: Any, x: tf.Tensor) -> tf.Tensor:
    """Return the result of a convolution with its bias, if it has one."""
    if not layer.use_bias:
        return x
    shape = [1] * x.shape.rank
    shape[channels_of(layer, x.shape.rank)] = -1
    return keras.ops.add(x, keras.ops.reshape(layer.bias, shape))


def is_pooling_of_means(layer: Any) -> bool:
    """Return whether a pooling layer computes means, and not maxima."""
    return type(layer).__name__.startswith("Average")


def axes_that_mix(layer: Any, rank: int) -> set[int]:
    """Return the axes along which a layer of kind ``CHANNELS`` needs all numbers of an array."""
    own = getattr(layer, "axis", -1)
    return {axis % rank for axis in (own if isinstance(own, Sequence) else [own])}


def axis_of_join(operation: Any, rank: int) -> int:
    """Return the axis along which an operation joins arrays of a rank."""
    return int(operation.axis % rank)


def _each(value: Any, number: int) -> tuple[int, ...]:
    return (value,) * number if isinstance(value, int) else tuple(value)
