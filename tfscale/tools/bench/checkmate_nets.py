"""The nets of Checkmate's figure 5, and their layers as a graph in its model of cost and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tfscale.bridge.objects import names_before
from tfscale.training.recompute.graph import Graph, Node

BYTES = 4
CLASSES = 19  # classes of Cityscapes, which the segmentation nets tell apart


def graph_of_layers(model: Any, batch: float) -> Graph:
    """Return the layers of a functional model and their gradients as a graph.

    The gradient of a layer needs the layer's output, those of the layers behind it, and their
    gradients. It is as large as the output and costs twice as much.
    """
    layers = [layer for layer in model.layers if type(layer).__name__ != "InputLayer"]
    number = {layer.name: i for i, layer in enumerate(layers)}
    needs = [[number[name] for name in names_before(layer) if name in number] for layer in layers]
    users: list[list[int]] = [
        [i for i, each in enumerate(needs) if k in each] for k in number.values()
    ]
    count = len(layers)
    nodes = [
        Node(_multiplications(layer) * batch, _numbers(layer) * BYTES * batch, tuple(sorted(each)))
        for layer, each in zip(layers, needs, strict=True)
    ]
    nodes.append(Node(0.0, BYTES, (count - 1,)))
    for layer in reversed(range(count)):
        gradients = [2 * count - user for user in users[layer]] or [count]
        needed = tuple(sorted({layer, *users[layer], *gradients}))
        nodes.append(Node(2 * nodes[layer].cost, nodes[layer].size, needed, once=True))
    return Graph(tuple(nodes), 2.0 * BYTES * model.count_params(), first_again=count)


def _shapes(tensors: Any) -> list[tuple[int, ...]]:
    listed = tensors if isinstance(tensors, list) else [tensors]
    return [tuple(tensor.shape[1:]) for tensor in listed]


def _numbers(layer: Any) -> int:
    return math.prod(_shapes(layer.output)[0])


def _multiplications(layer: Any) -> float:
    """Return the multiplications of a layer for one sample, as Checkmate counts them."""
    kind, numbers = type(layer).__name__, _numbers(layer)
    inputs = _shapes(layer.input)
    channels = inputs[0][-1]
    taken = sum(math.prod(shape) for shape in inputs)
    counts: dict[str, Callable[[], float]] = {
        "Conv2D": lambda: math.prod(layer.kernel_size) * channels * numbers,
        "Conv2DTranspose": lambda: channels * numbers,
        "DepthwiseConv2D": lambda: math.prod(layer.kernel_size) * numbers,
        "Dense": lambda: channels * numbers,
        "BatchNormalization": lambda: 4 * taken,
        "Activation": lambda: taken,
        "ReLU": lambda: taken,
        "Add": lambda: taken,
        "UpSampling2D": lambda: numbers,
    }
    return float(counts[kind]()) if kind in counts else 0.0


# ------------------------------------------------------------------ nets


def _application(name: str) -> Callable[[Any], Any]:
    return lambda keras: getattr(keras.applications, name)(weights=None)


def _vgg_levels(keras: Any, x: Any) -> list[Any]:
    """Return the outputs of the blocks of VGG16."""
    levels = []
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            x = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
        levels.append(x)
    return levels


def _plain_levels(keras: Any, x: Any) -> list[Any]:
    """Return the outputs of five blocks of one convolution each."""
    levels = []
    for width in (64, 128, 256, 256, 256):
        x = keras.layers.Activation("relu")(_padded(keras, x, width))
        x = keras.layers.MaxPooling2D()(x)
        levels.append(x)
    return levels


def _padded(keras: Any, x: Any, width: int, activation: str | None = None) -> Any:
    x = keras.layers.ZeroPadding2D(1)(x)
    x = keras.layers.Conv2D(width, 3, activation=activation)(x)
    return keras.layers.BatchNormalization()(x)


def _classes(keras: Any, inputs: Any, x: Any) -> Any:
    _, height, width, channels = x.shape
    return keras.Model(inputs, keras.layers.Reshape((height * width, channels))(x))


def _unet(keras: Any) -> Any:
    inputs = keras.Input((416, 608, 3))
    *skips, x, _ = _vgg_levels(keras, inputs)
    x = _padded(keras, x, 512, "relu")
    for width in (256, 128, 64):
        x = keras.layers.Concatenate()([keras.layers.UpSampling2D()(x), skips.pop()])
        x = _padded(keras, x, width, "relu")
    return _classes(keras, inputs, keras.layers.Conv2D(CLASSES, 3, padding="same")(x))


def _segnet(keras: Any) -> Any:
    inputs = keras.Input((416, 608, 3))
    x = _padded(keras, _plain_levels(keras, inputs)[3], 512)
    for width in (256, 128, 64):
        x = _padded(keras, keras.layers.UpSampling2D()(x), width)
    return _classes(keras, inputs, keras.layers.Conv2D(CLASSES, 3, padding="same")(x))


def _fcn8(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((416, 608, 3))
    *_, third, fourth, x = _plain_levels(keras, inputs)
    for kernel in (7, 1):
        x = layers.Conv2D(4096, kernel, activation="relu", padding="same")(x)
        x = layers.Dropout(0.5)(x)
    x = layers.Conv2D(CLASSES, 1)(x)
    for skip in (fourth, third):
        x = layers.Conv2DTranspose(CLASSES, 4, strides=2, use_bias=False)(x)
        skip = layers.Conv2D(CLASSES, 1)(skip)
        below, right = x.shape[1] - skip.shape[1], x.shape[2] - skip.shape[2]
        x = layers.Cropping2D(((0, below), (0, right)))(x)
        x = layers.Add()([x, skip])
    x = layers.Conv2DTranspose(CLASSES, 16, strides=8, use_bias=False)(x)
    return _classes(keras, inputs, x)


NETS: dict[str, Callable[[Any], Any]] = {
    "VGG19": _application("VGG19"),
    "U-Net": _unet,
    "ResNet50": _application("ResNet50"),
    "MobileNet": _application("MobileNet"),
    "FCN8": _fcn8,
    "SegNet": _segnet,
}
