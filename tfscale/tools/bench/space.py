"""A space of 64 nets for scikit-learn's digits: searched, and trained one by one."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from tfscale.tools.bench import digits

CHOICES: dict[str, tuple[int, ...]] = {
    "width": (4, 8, 16, 24), "kernel": (3, 5), "layers": (1, 2), "head": (16, 64), "bits": (4, 8),
}  # fmt: skip
_EPOCHS, _BATCH, _ROWS, _REPEATS = 12, 50, 256, 7


def build(net: dict[str, int]) -> Any:
    """Return the net of some choices; its bits do not count here."""
    import keras

    layers = keras.layers
    x = first = keras.Input((8, 8, 1))
    for _ in range(net["layers"]):
        x = layers.Conv2D(net["width"], net["kernel"], padding="same", activation="relu")(x)
    x = layers.Dense(net["head"], "relu")(layers.Flatten()(layers.MaxPooling2D(2)(x)))
    return keras.Model(first, layers.Dense(10)(x))


def score(net: dict[str, int], effort: float) -> float:
    """Return the test accuracy, in percent, of a net that is trained with its bits."""
    import keras

    from tfscale.analysis.quantize import apply

    keras.utils.set_random_seed(0)
    (x, y), test = digits.load()
    model = build(net)
    small = apply(model, {layer.name: net["bits"] for layer in model.layers if layer.weights})
    epochs = max(1, round(effort * _EPOCHS))
    rate = keras.optimizers.schedules.CosineDecay(5e-3, epochs * -(-len(x) // _BATCH))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    small.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"], jit_compile=False)
    small.fit(x, y, batch_size=_BATCH, epochs=epochs, verbose=0)
    return float(100 * small.evaluate(*test, batch_size=_ROWS, verbose=0)[1])


def nets() -> list[dict[str, int]]:
    """Return all nets of the space."""
    return [dict(zip(CHOICES, each)) for each in itertools.product(*CHOICES.values())]


def latencies() -> dict[str, dict[Any, float]]:
    """Return measured seconds of each choice.

    The first choices together are the base, which all blocks share equally. Each other choice is
    measured in the base, and counts with the difference. The processor computes all bits alike, so
    time counts for 8 bits, and 4 bits count as nothing.
    """
    base = {block: choices[0] for block, choices in CHOICES.items()}
    share = _seconds(base) / len(CHOICES)
    found: dict[str, dict[Any, float]] = {}
    for block, choices in CHOICES.items():
        found[block] = {choices[0]: share}
        for choice in choices[1:]:
            more = _seconds({**base, block: choice}) - share * len(CHOICES)
            found[block][choice] = share + (0.0 if block == "bits" else max(0.0, more))
    return found


def _seconds(net: dict[str, int]) -> float:
    """Return the smallest time of some answers for a batch."""
    import tensorflow as tf

    model = build(net)
    answer = tf.function(lambda x: model(x, training=False), autograph=False)
    x = tf.zeros((_ROWS, 8, 8, 1))
    answer(x)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        answer(x)
        times.append(time.perf_counter() - start)
    return float(np.min(times))
