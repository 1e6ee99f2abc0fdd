"""Nets of ``keras.applications`` and of the examples of keras.io, small enough for two cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Net = tuple[Any, int]  # a model, and the size of its batch


def _application(name: str, pixels: int, batch: int) -> Callable[[Any], Net]:
    def make(keras: Any) -> Net:
        settings = {"input_shape": (pixels, pixels, 3), "weights": None, "pooling": "avg"}
        body = getattr(keras.applications, name)(include_top=False, **settings)
        return keras.Sequential([body, keras.layers.Dense(1)]), batch

    return make


def _unet(keras: Any) -> Net:
    """Return the net of "Image segmentation with a U-Net-like architecture"."""
    layers = keras.layers
    inputs = keras.Input((96, 96, 3))
    x = layers.Conv2D(32, 3, strides=2, padding="same")(inputs)
    x = previous = layers.Activation("relu")(layers.BatchNormalization()(x))
    for width in (64, 128, 256):
        for _ in range(2):
            x = layers.SeparableConv2D(width, 3, padding="same")(layers.Activation("relu")(x))
            x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        shortcut = layers.Conv2D(width, 1, strides=2, padding="same")(previous)
        x = previous = layers.add([x, shortcut])
    for width in (256, 128, 64, 32):
        for _ in range(2):
            x = layers.Conv2DTranspose(width, 3, padding="same")(layers.Activation("relu")(x))
            x = layers.BatchNormalization()(x)
        x = layers.UpSampling2D(2)(x)
        shortcut = layers.Conv2D(width, 1, padding="same")(layers.UpSampling2D(2)(previous))
        x = previous = layers.add([x, shortcut])
    x = layers.Conv2D(3, 3, activation="softmax", padding="same")(x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x))), 16


def _vit(keras: Any) -> Net:
    """Return the net of "Image classification with Vision Transformer"."""
    layers = keras.layers
    inputs = keras.Input((72, 72, 3))
    x = layers.Conv2D(64, 6, strides=6)(inputs)
    x = layers.Reshape((144, 64))(x)
    for _ in range(8):
        h = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([layers.MultiHeadAttention(4, 64, dropout=0.1)(h, h), x])
        h = layers.LayerNormalization(epsilon=1e-6)(x)
        for width in (128, 64):
            h = layers.Dropout(0.1)(layers.Dense(width, activation="gelu")(h))
        x = layers.Add()([h, x])
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x))
    x = layers.Dropout(0.5)(x)
    x = layers.Dropout(0.5)(layers.Dense(512, activation="gelu")(x))
    return keras.Model(inputs, layers.Dense(1)(x)), 16


def _gpt(keras: Any) -> Net:
    """Return the net of "Text generation with a miniature GPT", with four blocks."""
    layers = keras.layers
    inputs = keras.Input((80, 256))
    x = layers.Dropout(0.1)(inputs)
    for _ in range(4):
        h = layers.MultiHeadAttention(2, 128)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(h))
        h = layers.Dense(256)(layers.Dense(256, activation="relu")(x))
        x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(h))
    x = layers.Dense(1000, activation="softmax")(x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x))), 48


def _mixer(keras: Any) -> Net:
    """Return the net of "Image classification with modern MLP models"."""
    layers = keras.layers
    inputs = keras.Input((64, 64, 3))
    x = layers.Reshape((64, 256))(layers.Conv2D(256, 8, strides=8)(inputs))
    for _ in range(4):
        h = layers.Permute((2, 1))(layers.LayerNormalization(epsilon=1e-6)(x))
        h = layers.Dense(64)(layers.Dense(64, activation="gelu")(h))
        x = x + layers.Permute((2, 1))(layers.Dropout(0.2)(h))
        h = layers.Dense(256, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
        x = x + layers.Dropout(0.2)(layers.Dense(256)(h))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x))), 64


def _convmixer(keras: Any) -> Net:
    """Return the net of "Image classification with ConvMixer"."""
    layers = keras.layers

    def normalized(x: Any) -> Any:
        return layers.BatchNormalization()(layers.Activation("gelu")(x))

    inputs = keras.Input((32, 32, 3))
    x = normalized(layers.Conv2D(128, 2, strides=2)(inputs))
    for _ in range(8):
        h = normalized(layers.DepthwiseConv2D(5, padding="same")(x))
        x = normalized(layers.Conv2D(128, 1)(layers.Add()([h, x])))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x))), 32


NETS: dict[str, Callable[[Any], Net]] = {
    "MLP-Mixer": _mixer,
    "miniature GPT": _gpt,
    "ConvMixer": _convmixer,
    "ViT": _vit,
    "U-Net": _unet,
    "VGG16": _application("VGG16", 64, 32),
    "MobileNetV2": _application("MobileNetV2", 96, 16),
    "ResNet50": _application("ResNet50", 64, 16),
    "DenseNet121": _application("DenseNet121", 64, 16),
    "EfficientNetB0": _application("EfficientNetB0", 64, 16),
}
