"""The programs of ``tfscale bench first``, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

Shapes = tuple[tuple[int, ...], ...]
LATENT = 128


def resnet50() -> tuple[keras.Model, Shapes]:
    """Return Keras's ResNet50 for small images, and the shapes of a row of its data."""
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, ((32, 32, 3), ())


def transformer(blocks: int = 12, width: int = 64, words: int = 16) -> tuple[keras.Model, Shapes]:
    """Return a transformer, and the shapes of a row of its data."""
    x = inputs = keras.Input((words, width))
    for _ in range(blocks):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4, dropout=0.1)(h, h)
        h = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(width)(h))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adamw", loss, metrics=["accuracy"])
    return model, ((words, width), ())


class Gan(keras.Model):
    """The program of Keras's guide "Customizing fit": two optimizers, and a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(64, 3, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Conv2D(128, 3, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.GlobalMaxPooling2D(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                layers.Dense(7 * 7 * 128),
                layers.BatchNormalization(),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Reshape((7, 7, 128)),
                layers.Conv2DTranspose(128, 4, strides=2, padding="same"),
                layers.BatchNormalization(),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Conv2DTranspose(128, 4, strides=2, padding="same"),
                layers.BatchNormalization(),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Conv2D(1, 7, padding="same", activation="sigmoid"),
            ]
        )
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.built = True  # its layers are, and it has no call

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        """Take two optimizers and one loss."""
        super().compile(jit_compile=False)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, data: Any) -> dict[str, Any]:
        """Train the discriminator, then the generator."""
        real = data[0] if isinstance(data, tuple) else data
        rows = ops.shape(real)[0]
        noise = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        both = ops.concatenate([self.generator(noise, training=True), real], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both, training=True))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        noise = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            forged = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = self.loss_fn(ops.zeros((rows, 1)), forged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def gan() -> tuple[keras.Model, Shapes]:
    """Return the model of the guide, and the shape of a row of its data."""
    model = Gan()
    adams = [keras.optimizers.Adam(3e-4) for _ in range(2)]
    model.compile(*adams, keras.losses.BinaryCrossentropy(from_logits=True))
    return model, ((28, 28, 1),)


MODELS: dict[str, Callable[[], tuple[keras.Model, Shapes]]] = {
    each.__name__: each for each in (resnet50, transformer, gan)
}
