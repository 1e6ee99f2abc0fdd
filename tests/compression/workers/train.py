"""Trains with methods, and prints the sums of weights: all bits of them."""

import json
import sys

import keras
import numpy as np

from tfscale import ScaleStrategy
from tfscale.compression import PowerSGD, RandomK, Settled, Staged, TopK, Wire

METHODS = {
    "embed": Wire("int4"),
    "conv": PowerSGD(2, factors="bf16"),
    "middle": TopK(0.05, wire="int8", momentum=0.5),
    "head": Staged("int4", RandomK(0.2), when=5),
    "*": Staged("fp32", Wire("int8", feedback=True), when=Settled(0.01, over=2)),
}


def train(strategy, epochs=3):
    """A model with a table, a convolution and dense layers, on 29 samples in batches of 8."""
    layers = keras.layers
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input([10], dtype="int32"),
            layers.Embedding(300, 16, name="embed"),
            layers.Conv1D(32, 3, activation="relu", name="conv"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, "relu", name="middle"),
            layers.Dense(48, "relu", name="last"),
            layers.Dense(32, name="head"),
        ])  # fmt: skip
        model.compile(keras.optimizers.SGD(0.05), "mse")
    random = np.random.default_rng(1)
    x = random.integers(0, 300, [29, 10])
    y = random.standard_normal([29, 32]).astype("float32")
    losses = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]
    return model, losses


if __name__ == "__main__":
    strategy = ScaleStrategy("ring", method=METHODS)
    model, losses = train(strategy)
    weights = [w.astype(float).sum() for w in model.get_weights()]
    methods = sorted({row.method for row in strategy.explain()})
    print("TRAINED", json.dumps([weights, losses, methods]), flush=True)
    sys.stdout.flush()
