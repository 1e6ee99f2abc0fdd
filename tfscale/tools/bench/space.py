"""A space of 256 nets for scikit-learn's digits: searched, and trained one by one."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

from tfscale.tools.bench import digits
from tfscale.tools.bench.measure import in_turn

CHOICES: dict[str, tuple[int, ...]] = {
    "width": (4, 8, 16, 24), "kernel": (3, 5), "layers": (1, 2), "head": (16, 32, 64, 128),
    "bits": (2, 3, 4, 8),
}  # fmt: skip
_EPOCHS, _BATCH, _ROWS, _REPEATS = 40, 50, 256, 200


def build(net: dict[str, int]) -> Any:
    """Return the net of some choices; its bits do not count here."""
    import keras

    layers = keras.layers
    x = first = keras.Input((8, 8, 1))
    for _ in range(net["layers"]):
        x = layers.Conv2D(net["width"], net["kernel"], padding="same", activation="relu")(x)
    x = layers.Dense(net["head"], "relu")(layers.Flatten()(layers.MaxPooling2D(2)(x)))
    return keras.Model(first, layers.Dense(10)(x))


def score(net: dict[str, int], effort: float) -> tuple[float, float]:
    """Return the test accuracy, in percent, of a net that is trained with its bits, and the seconds
    of processor time that this took.
    """
    import keras

    from tfscale.analysis.quantize import apply

    begin = time.process_time()
    keras.utils.set_random_seed(0)
    training, test = digits.load()
    model = build(net)
    small = apply(model, {layer.name: net["bits"] for layer in model.layers if layer.weights})
    epochs = max(1, round(effort * _EPOCHS))
    rate = keras.optimizers.schedules.CosineDecay(5e-3, epochs * -(-len(training[0]) // _BATCH))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    small.compile(keras.optimizers.Adam(rate), loss, jit_compile=False)
    small.fit(digits.batches(training, _BATCH, epochs), verbose=0)
    return digits.judge(small, *test)[0], time.process_time() - begin


def nets() -> list[dict[str, int]]:
    """Return all nets of the space."""
    return [dict(zip(CHOICES, each)) for each in itertools.product(*CHOICES.values())]


def latencies() -> dict[str, list[tuple[int, float]]]:
    """Return pairs of a choice and its measured seconds, for each block.

    The first choices together are the base, which all blocks share equally. Each other choice is
    measured in the base, and counts with the difference. The processor computes all bits alike, so
    bits make no difference.
    """
    base = {block: choices[0] for block, choices in CHOICES.items()}
    others = [
        (block, choice)
        for block, choices in CHOICES.items()
        for choice in choices[1:]
        if block != "bits"
    ]
    seconds = _seconds([base, *({**base, block: choice} for block, choice in others)])
    share = seconds[0] / len(CHOICES)
    found: dict[str, dict[Any, float]] = {
        block: dict.fromkeys(choices, share) for block, choices in CHOICES.items()
    }
    for (block, choice), one in zip(others, seconds[1:], strict=True):
        found[block][choice] += max(0.0, one - seconds[0])
    return {block: list(pairs.items()) for block, pairs in found.items()}


def _seconds(nets: list[dict[str, int]]) -> list[float]:
    """Return the smallest time of some answers of each net for a batch, measured in turns."""
    import tensorflow as tf

    def answer(net: dict[str, int]) -> Any:
        model = build(net)
        return tf.function(lambda x: model(x, training=False), autograph=False)

    x = tf.zeros((_ROWS, 8, 8, 1))
    calls = {str(number): functools.partial(answer(net), x) for number, net in enumerate(nets)}
    return [min(times) for times in in_turn(calls, _REPEATS, warm_up=0).values()]
