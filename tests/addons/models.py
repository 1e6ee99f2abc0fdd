"""Models of Keras 2 that train with parts of tensorflow-addons."""

import contextlib

import numpy as np
import tensorflow as tf
import tensorflow_addons as tfa

import tfscale
from tfscale.compression import WirePolicy

OPTIMIZERS = {
    "sgd clipped": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1),
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
    "legacy adam": lambda: tf.keras.optimizers.legacy.Adam(0.01),
    "tfa lamb": lambda: tfa.optimizers.LAMB(0.01, weight_decay=0.01),
    "tfa adamw": lambda: tfa.optimizers.AdamW(0.01, 0.01),
    "tfa moving average": lambda: tfa.optimizers.MovingAverage(
        tf.keras.optimizers.legacy.SGD(0.05)
    ),
}


def scale(devices, wire="fp32"):
    """Every tensor on its wire, however small, and always by the same schedule."""
    names = [f"CPU:{i}" for i in range(devices)]
    return tfscale.ScaleStrategy("ring", WirePolicy(wire, rules={".": wire}), names)


def train(optimizer, strategy=None, epochs=3, backwards=False):
    """The weights of a small model after some epochs, and what ``fit`` has logged.

    ``backwards``: the same batches, their rows in the opposite order.
    """
    tf.keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [
                tf.keras.Input((8,)),
                layers.Dense(16, activation=tfa.activations.gelu),
                tfa.layers.WeightNormalization(layers.Dense(8), data_init=False),
                tfa.layers.GroupNormalization(groups=2),
                layers.Dense(1),
            ]
        )
        loss = tfa.losses.PinballLoss(0.4)
        model.compile(OPTIMIZERS[optimizer](), loss, metrics=[tfa.metrics.RSquare()])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8), np.float32)
    if backwards:
        x = x.reshape(4, 16, 8)[:, ::-1].reshape(64, 8)
    y = x.sum(1, keepdims=True)
    history = model.fit(
        x, y, batch_size=16, epochs=epochs, shuffle=False, validation_data=(x, y), verbose=0
    )
    return [np.asarray(w, np.float64) for w in model.get_weights()], history.history


def furthest(a, b):
    return max(np.abs(x - y).max() for x, y in zip(a, b, strict=True))
