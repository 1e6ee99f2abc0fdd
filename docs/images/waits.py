"""The picture of docs/telemetry.md: four workers train, and one of them becomes slow."""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

import tfscale
from tfscale.tools.bench.shares import sleeps
from tfscale.tools.launch import LocalWorkers

WORKERS, STEPS, SLOW, SINCE = 4, 60, 2, 20
ROWS = 4  # of a worker's part of the batch


def draw_waits() -> Figure:
    """Train with four workers, and draw from their telemetry whom the others wait for."""
    with tempfile.TemporaryDirectory() as folder:
        with LocalWorkers([sys.executable, __file__, folder], WORKERS) as group:
            group.wait(300.0)
        lines = sorted(pathlib.Path(folder).glob("run.rank*.jsonl"))
        figure: Figure = tfscale.telemetry.stragglers(lines).draw(40)
    return figure


def seconds_of(worker: int) -> Iterator[float]:
    """Yield how long each step takes a worker: 90 to 130 ms, then 2.5 times as long for one."""
    dice = random.Random(worker)
    for step in range(STEPS):
        slower = 2.5 if worker == SLOW and step >= SINCE else 1.0
        yield slower * dice.uniform(0.09, 0.13)


def train(folder: str) -> None:
    """Train as one of the workers, and write telemetry."""
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with tfscale.ScaleStrategy("ring").scope():
        works = sleeps(seconds / ROWS for seconds in seconds_of(worker))
        model = keras.Sequential([keras.Input([8]), works, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones([ROWS * WORKERS, 8])
    told = tfscale.callbacks.Telemetry(pathlib.Path(folder) / "run.jsonl")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(len(x)).repeat()
    model.fit(data, steps_per_epoch=STEPS, verbose=0, callbacks=[told])


if __name__ == "__main__":
    train(sys.argv[1])
