"""Trains nets of several kinds within budgets, in one process each, and prints what they took.

``python -m tests.recompute.budgets [NET ...]``; for one net, a process of its own: ``--here NET``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfscale.bridge.feed import untuned
from tfscale.callbacks import Recompute
from tfscale.recompute import BudgetError
from tfscale.tools.bench.memory import COUNTED, make_meter

BETWEEN = (0, 0.15, 0.3, 0.5, 0.7, 0.85, 1)  # of the smallest budget and a plain step


def mlp():
    """Weights that are larger than results."""
    layers = [keras.layers.Dense(1024, activation="gelu") for _ in range(16)]
    return keras.Sequential([keras.Input((1024,)), *layers, keras.layers.Dense(1)]), 400


def convolutions():
    widths = (32, 32, 64, 64, 96)
    layers = [keras.layers.Conv2D(width, 3, activation="relu") for width in widths]
    body = [one for layer in layers for one in (layer, keras.layers.Dropout(0.2))]
    flat = [keras.layers.Flatten(), keras.layers.Dense(64), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((64, 64, 3)), *body, *flat]), 16


def mixer():
    """Results of many sizes."""
    x = inputs = keras.Input((96, 80))
    for k in range(8):
        h = keras.layers.Permute((2, 1))(keras.layers.LayerNormalization()(x))
        h = keras.layers.Dense(96)(keras.layers.Dense(96 + 17 * k, "gelu")(h))
        x = x + keras.layers.Permute((2, 1))(h)
        h = keras.layers.Dense(200 + 31 * k, "silu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(80)(h)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x))), 64


def transformer():
    x = inputs = keras.Input((128, 256))
    for _ in range(8):
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(8, 32, dropout=0.1)(h, h)
        h = keras.layers.Dense(1024, "gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dropout(0.1)(keras.layers.Dense(256)(h))
    pooled = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(1)(pooled)), 3


def unet():
    def twice(x, width):
        for _ in range(2):
            x = keras.layers.Conv2D(width, 3, padding="same")(x)
            x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        return x

    x = inputs = keras.Input((64, 64, 3))
    skips = []
    for width in (16, 32, 64):
        skips.append(twice(x, width))
        x = keras.layers.MaxPooling2D()(skips[-1])
    for width in (64, 32, 16):
        x = keras.layers.Conv2DTranspose(width, 3, 2, padding="same")(x)
        x = twice(keras.layers.Concatenate()([x, skips.pop()]), width)
    pooled = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(1)(pooled)), 16


def mobilenet():
    shape = (96, 96, 3)
    net = keras.applications.MobileNetV2(shape, weights=None, classes=1, classifier_activation=None)
    return net, 16


NETS = {make.__name__: make for make in (mlp, convolutions, mixer, transformer, unet, mobilenet)}


def train(net, **choice):
    """Return the memory that a training took, and its callback."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model, size = NETS[net]()
    model.compile(keras.optimizers.SGD(1e-5), "mse", jit_compile=False)
    x = np.random.default_rng(0).standard_normal((size, *model.input_shape[1:]), np.float32)
    batch = (x, x[:, :1].reshape(size, -1)[:, :1])
    first = tf.data.Dataset.from_tensors(tuple(part[:1] for part in batch))
    data = first.concatenate(tf.data.Dataset.from_tensors(batch).repeat(4))
    meter, recompute = make_meter(keras, tf), Recompute(example=batch, verbose=0, **choice)
    # Tuned data would hold the end of each fit for up to seconds.
    model.fit(untuned(data), verbose=0, callbacks=[meter, recompute])
    return meter.allocated, recompute


def train_all(net):
    """Return each budget with the memory that was taken, and that was expected."""
    try:
        train(net, budget=1)
    except BudgetError as refused:
        smallest, plain = refused.smallest, refused.plain
    found = []
    for between in BETWEEN:
        budget = smallest + between * (plain - smallest)
        taken, recompute = train(net, budget=budget)
        found.append((budget, taken, recompute.plan.peak))
    return found


def in_a_process(net):
    ran = subprocess.run(
        [sys.executable, "-m", "tests.recompute.budgets", "--here", net],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **COUNTED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", default=NETS)
    parser.add_argument("--here", action="store_true", help="in this process, as a line of JSON")
    asked = parser.parse_args()
    if asked.here:
        (net,) = asked.nets
        print(json.dumps(train_all(net)))
        return
    for net in asked.nets:
        for budget, taken, expected in in_a_process(net):
            mb = f"{budget / 1e6:7.1f} MB, taken {taken / 1e6:7.1f}, expected {expected / 1e6:7.1f}"
            print(f"{net:13} budget {mb}: {taken / budget:.0%} of it", flush=True)


if __name__ == "__main__":
    main()
