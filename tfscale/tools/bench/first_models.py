"""The programs of ``tfscale bench first``, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

Shapes = tuple[tuple[int, ...], ...]
LATENT = 100


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
    """The program of TensorFlow's DCGAN tutorial: two optimizers, and a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                layers.Dense(7 * 7 * 256, use_bias=False),
                layers.BatchNormalization(),
                layers.LeakyReLU(),
                layers.Reshape((7, 7, 256)),
                layers.Conv2DTranspose(128, 5, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.LeakyReLU(),
                layers.Conv2DTranspose(64, 5, strides=2, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.LeakyReLU(),
                layers.Conv2DTranspose(1, 5, strides=2, padding="same", activation="tanh"),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(64, 5, strides=2, padding="same"),
                layers.LeakyReLU(),
                layers.Dropout(0.3),
                layers.Conv2D(128, 5, strides=2, padding="same"),
                layers.LeakyReLU(),
                layers.Dropout(0.3),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")
        self.built = True  # the layers are built, and there is no `call`

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        """Take two optimizers and one loss."""
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        # MirroredStrategy cannot make an optimizer's variables in a step.
        d_optimizer.build(self.discriminator.trainable_weights)
        g_optimizer.build(self.generator.trainable_weights)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Train both by the same batch."""
        images, noise = data
        with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
            forged = self.generator(noise, training=True)
            on_images = self.discriminator(images, training=True)
            on_forged = self.discriminator(forged, training=True)
            g_loss = self.loss_fn(ops.ones_like(on_forged), on_forged)
            d_loss = self.loss_fn(ops.ones_like(on_images), on_images)
            d_loss += self.loss_fn(ops.zeros_like(on_forged), on_forged)
        for tape, loss, part, optimizer in (
            (g_tape, g_loss, self.generator, self.g_optimizer),
            (d_tape, d_loss, self.discriminator, self.d_optimizer),
        ):
            weights = part.trainable_weights
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def gan() -> tuple[keras.Model, Shapes]:
    """Return the model of the tutorial, and the shapes of a row of its data."""
    model = Gan()
    model.compile(
        d_optimizer=keras.optimizers.Adam(3e-4),
        g_optimizer=keras.optimizers.Adam(3e-4),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model, ((28, 28, 1), (LATENT,))


MODELS: dict[str, Callable[[], tuple[keras.Model, Shapes]]] = {
    each.__name__: each for each in (resnet50, transformer, gan)
}
