"""One process of the demo: ``python -m tfscale.tools.demo.worker WIRE EPOCHS FILE``.

It is like any user's program, but prints records for the parent: a line of JSON after each epoch,
and one at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale import ScaleStrategy
from tfscale.tools.bench import digits, machine
from tfscale.tools.bench.measure import leave
from tfscale.tools.demo.training import DEVICES, PROCESSES

BATCH = 64


def main(wire: str, epochs: int, file: str) -> None:
    """Train with the given setup, and print the results as lines of JSON."""
    keras.utils.set_random_seed(0)
    strategy = make_strategy(wire)
    with strategy.scope():
        model = make_model()
    training, test = digits.load()
    notes = Notes()
    # A fixed order makes weights comparable with those of one device.
    model.fit(
        *training, BATCH, epochs, shuffle=False, verbose=0, callbacks=[notes],
        validation_data=test, validation_batch_size=len(test[0]),
    )  # fmt: skip
    note(
        step_seconds=statistics.median(notes.seconds),
        sent=bytes_sent(strategy),
        digests=digests(strategy, model),
    )
    if getattr(strategy.extended, "first_rank", 0) == 0:
        np.save(file, np.concatenate([np.ravel(weight) for weight in model.get_weights()]))


def make_strategy(wire: str) -> tf.distribute.Strategy:
    """Return a strategy with a wire, or Keras's default strategy without one."""
    if wire == "none":
        return tf.distribute.get_strategy()
    # Split the CPU into several devices before the strategy starts TensorFlow.
    machine.split_cpu(DEVICES)
    return ScaleStrategy(wire=wire)


def make_model() -> keras.Model:
    """Make a model that is smooth everywhere.

    At the edges of relu and of max pooling, rounding decides the direction, and from there even two
    trainings on one device would drift apart.
    """
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="elu"),
            layers.Conv2D(64, 3, padding="same", activation="elu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="elu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


def bytes_sent(strategy: tf.distribute.Strategy) -> int:
    """Return the bytes that the replicas of this process have sent to all others."""
    group = getattr(strategy.extended, "group", None)
    communicators = group.communicators if group else []
    return sum(total.sent for c in communicators for total in c.totals().values())


def digests(strategy: tf.distribute.Strategy, model: keras.Model) -> list[str]:
    """Return a digest for each replica of this process: equal only if all weights are."""
    weights = [strategy.experimental_local_results(w.value) for w in model.weights]
    return [
        hashlib.sha256(b"".join(w.numpy().tobytes() for w in replica)).hexdigest()
        for replica in zip(*weights, strict=True)
    ]


def note(**record: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(record), flush=True)


class Notes(keras.callbacks.Callback):
    """A callback that reports the progress of the training, and the time of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note the start of a step."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time of a step."""
        self.seconds.append(time.perf_counter() - self._start)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report an epoch."""
        note(epoch=logs)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    everybody = 1 if sys.argv[1] == "none" else PROCESSES
    leave(str(Path(sys.argv[3]).parent), "worker", me, everybody)
