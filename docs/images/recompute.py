"""The picture of docs/recompute.md: the memory of a transformer's step over time."""

from __future__ import annotations

import keras
import tensorflow as tf
from matplotlib.figure import Figure

from tfscale import recompute


def draw_memory_over_time() -> Figure:
    """Draw a step without recomputation, with segments and with single results, at 40 %."""
    x = inputs = keras.Input((128, 256))
    for _ in range(6):
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(8, 32, dropout=0.1)(h, h)
        h = keras.layers.Dense(1024, "gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dropout(0.1)(keras.layers.Dense(256)(h))
    outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    batch = (tf.TensorSpec([32, 128, 256]), tf.TensorSpec([32, 1]))
    plan = recompute.plan_fraction(recompute.trace(model, batch), 0.4, solver="auto")
    figure: Figure = plan.compare()
    return figure
