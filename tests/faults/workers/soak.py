"""A worker that trains for SECONDS, and notes after each epoch what its process holds.

Prints lines ``HELD seconds bytes descriptors threads``.
"""

import os
import time

import keras
import numpy as np
import psutil
import tensorflow as tf

import tfscale

SECONDS = float(os.environ["SECONDS"])


class Note(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.began, self.process = time.monotonic(), psutil.Process()

    def on_epoch_end(self, epoch, logs=None):
        held = self.process.memory_info().rss, self.process.num_fds(), self.process.num_threads()
        print("HELD", round(time.monotonic() - self.began, 1), *held, flush=True)


def main():
    keras.utils.set_random_seed(1)
    strategy = tfscale.ScaleStrategy(wire={"kernel": "int8", "*": "fp32"})
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([256]),
                keras.layers.Dense(1024, "relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1024, "relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal([1000, 256], np.float32), rng.integers(0, 10, 1000)
    note = Note()
    over = False
    while not over:
        history = model.fit(x, y, batch_size=64, epochs=20, verbose=0, callbacks=[note])
        assert np.isfinite(history.history["loss"][-1])
        over = on_any_worker(strategy, time.monotonic() > note.began + SECONDS)


def on_any_worker(strategy, over):
    (communicator,) = strategy.extended.hosts.communicators
    return bool(tfscale.ops.all_reduce(tf.constant([float(over)]), communicator).numpy()[0])


if __name__ == "__main__":
    main()
