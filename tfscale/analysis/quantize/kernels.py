"""Weights of a model that can have few bits, and the layers that nobody knows how to quantize."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfscale.bridge.objects import holds_layers, layers_of, path_of


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A weight that can have few bits.

    Args:
        layer: the Keras layer that holds the weight.
        attribute: name of the weight in the layer.
        axes: axes of the channels: each channel has a scale of its own.
    """

    layer: Any
    attribute: str
    axes: tuple[int, ...]

    @property
    def variable(self) -> Any:
        """The variable that holds the numbers."""
        return getattr(self.layer, self.attribute)

    @property
    def path(self) -> str:
        """Path of the layer, which a plan maps to bits."""
        return layer_path(self.variable)

    @property
    def numbers(self) -> int:
        """Number of numbers in the weight."""
        return math.prod(self.variable.shape)


def layer_path(variable: Any) -> str:
    """Return the path of the layer that holds a variable."""
    path = path_of(variable)
    return path.rpartition("/")[0] or path


# Each class of layers: attributes of its kernels, and the axes of their channels.
_LAST, _DEPTHWISE = (-1,), (-2, -1)
_KNOWN: tuple[tuple[tuple[str, ...], dict[str, tuple[int, ...]]], ...] = (
    (("SeparableConv1D", "SeparableConv2D"), {
        "depthwise_kernel": _DEPTHWISE, "pointwise_kernel": _LAST,
    }),
    (("DepthwiseConv1D", "DepthwiseConv2D"), {"kernel": _DEPTHWISE}),
    (("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"), {"kernel": (-2,)}),
    (("Conv1D", "Conv2D", "Conv3D", "Dense"), {"kernel": _LAST}),
    (("Embedding",), {"embeddings": (0,)}),
)  # fmt: skip


# Names of all these weights.
ATTRIBUTES = tuple(sorted({name for _, attributes in _KNOWN for name in attributes}))


def kernels_of(model: Any) -> list[Kernel]:
    """Return the weights of a built model that can have few bits, in the model's order."""
    found: dict[int, Kernel] = {}
    for layer in layers_of(model):
        for attribute, axes in _attributes(layer).items():
            kernel = Kernel(layer, attribute, axes)
            if kernel.variable.trainable and id(kernel.variable) not in found:
                found[id(kernel.variable)] = kernel
    refuse_same_paths(found.values())
    return [found[id(v)] for v in model.trainable_variables if id(v) in found]


def unknown_of(model: Any) -> list[str]:
    """Return the paths of layers with matrices that stay in float: nobody knows how to quantize
    the layer, or the matrix is not trainable.
    """
    known = {kernel.path for kernel in kernels_of(model)}
    matrices = [v for v in model.weights if len(v.shape) > 1 and "float" in str(v.dtype)]
    return [path for path in dict.fromkeys(map(layer_path, matrices)) if path not in known]


def refuse_same_paths(kernels: Any) -> None:
    """Raise if two layers have the same path, which would get the same bits."""
    holders: dict[str, Any] = {}
    for kernel in kernels:
        holder = holders.setdefault(kernel.path, kernel.layer)
        if holder is not kernel.layer:
            raise ValueError(
                f"two layers have the path {kernel.path!r}, and a plan maps each path to bits: "
                "give them names, or the models that hold them, by name=..."
            )


def fingerprint(shapes: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """Return a hash of layers' paths and the shapes of their kernels."""
    told = json.dumps({path: [list(shape) for shape in each] for path, each in shapes.items()})
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def shapes_of(kernels: Sequence[Kernel]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the shapes of each layer's kernels, by the layer's path."""
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for kernel in kernels:
        shape = tuple(int(size) for size in kernel.variable.shape)
        found[kernel.path] = (*found.get(kernel.path, ()), shape)
    return found


@contextlib.contextmanager
def watching(layers: Sequence[Any], tell: Any) -> Iterator[None]:
    """Call ``tell(layer, inputs, outputs)`` at each call of the layers, while the block runs."""
    shadowed: list[Any] = []

    def shadow(layer: Any) -> None:
        plain = layer.call

        def call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = plain(inputs, *args, **kwargs)
            tell(layer, inputs, outputs)
            return outputs

        layer.call = call
        shadowed.append(layer)

    try:
        for layer in {id(one): one for one in layers}.values():
            shadow(layer)
        yield
    finally:
        for layer in shadowed:
            del layer.call


def products_of(kernel: Kernel, inputs: Any, outputs: Any) -> float:
    """Return the multiplications of a layer's call with one of its kernels, for one sample."""
    if isinstance(kernel.layer, keras.layers.Embedding):
        return 0.0
    made = math.prod(int(size) for size in outputs.shape[1:])
    shape = [int(size) for size in kernel.variable.shape]
    if _is_a(kernel.layer, ("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")):
        return math.prod(int(size) for size in inputs.shape[1:]) * math.prod(shape) / shape[-1]
    channels = math.prod(shape[axis] for axis in kernel.axes)
    if kernel.attribute == "depthwise_kernel":  # the pointwise kernel makes the layer's outputs
        made = made // int(outputs.shape[_channels_axis(kernel.layer)]) * channels
    return float(made * math.prod(shape) // channels)


def _channels_axis(layer: Any) -> int:
    return 1 if getattr(layer, "data_format", None) == "channels_first" else -1


def _is_a(layer: Any, names: Sequence[str]) -> bool:
    kinds = tuple(getattr(keras.layers, name) for name in names if hasattr(keras.layers, name))
    return isinstance(layer, kinds)


def _attributes(layer: Any) -> dict[str, tuple[int, ...]]:
    if getattr(layer, "quantization_mode", None) is not None or not layer.built:
        return {}
    if _is_a(layer, ("EinsumDense",)):
        return {"kernel": einsum_axes(layer)}
    if holds_layers(layer):
        return {}
    for names, attributes in _KNOWN:
        if _is_a(layer, names):
            return attributes
    return {}


def einsum_axes(layer: Any) -> tuple[int, ...]:
    """Return the axes of an EinsumDense's kernel that the output has and the input has not."""
    inputs, rest = layer.equation.replace(" ", "").split(",")
    kernel, outputs = rest.split("->")
    return tuple(i for i, letter in enumerate(kernel) if letter in outputs and letter not in inputs)
