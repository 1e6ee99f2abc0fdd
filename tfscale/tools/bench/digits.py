"""Scikit-learn's handwritten digits, and models that learn them in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

TRAINING = 1000  # images out of 1,797; the others are for the test
HIDDEN = 128  # large enough that no kernel is below a wire policy's ``small``


def load(training: int = TRAINING) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return images and labels, for training and for the test; the split never changes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("the digits need scikit-learn: pip install scikit-learn") from None
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = (data.images[order, :, :, np.newaxis] / 16).astype(np.float32)
    y = data.target[order].astype(np.int32)
    return (x[:training], y[:training]), (x[training:], y[training:])


def perceptron() -> Any:
    """Return a perceptron that is not compiled; Keras's seed decides its weights."""
    import keras

    layers = keras.layers
    hidden = [layers.Dense(HIDDEN, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), *hidden, layers.Dense(10)])


def convolution() -> Any:
    """Return a convolutional network that is not compiled; Keras's seed decides its weights."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def batches(training: tuple[Any, Any], size: int, epochs: int) -> Any:
    """Return the batches of all epochs as one data set.

    Keras then sees one epoch: to begin an epoch takes longer than a step of these small models.
    """
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(training)
    return data.shuffle(len(training[0])).batch(size).repeat(epochs)


def judge(model: Any, images: Any, truth: Any) -> tuple[float, float]:
    """Return a model's accuracy in %, and its loss."""
    logits = np.asarray(model(images), np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    likelihoods = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    accuracy = 100 * np.mean(logits.argmax(axis=-1) == truth)
    true = np.take_along_axis(likelihoods, truth[..., np.newaxis], axis=-1)
    return float(accuracy), float(-np.mean(true))
