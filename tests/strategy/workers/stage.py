"""A worker that holds one of two stages; VICTIM is killed within a turn of its third step.

Prints EVENT at the kill, and ERROR with what the other worker was told.
"""

import json
import os
import signal

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.strategy.workers import last

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
VICTIM, MICROBATCHES, LAST = int(os.environ["VICTIM"]), 4, 2
calls = 0


def kill(x):
    """End this worker in the turn of the microbatch LAST, in the third step."""
    global calls
    calls += 1
    if ME == VICTIM and calls > 2 * MICROBATCHES + LAST:
        last.event()
        os.kill(os.getpid(), signal.SIGKILL)
    return x


class Fatal(keras.layers.Layer):
    def call(self, x):
        same = tf.numpy_function(kill, [x], tf.float32, stateful=False)
        same.set_shape(x.shape)
        return x + 0 * tf.stop_gradient(same)

    def compute_output_shape(self, shape):
        return shape


def train():
    strategy = tfscale.ScaleStrategy(
        "ring",
        grid=tfscale.Grid(stages=2),
        pipeline=tfscale.Pipeline(["second"], MICROBATCHES),
        deadline=float(os.environ["DEADLINE"]),
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([4]),
                keras.layers.Dense(8, name="first"),
                *([Fatal()] if VICTIM == 0 else []),
                keras.layers.Dense(8, name="second"),
                *([Fatal()] if VICTIM == 1 else []),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    x = np.ones((320, 4), "f4")
    model.fit(x, x[:, :1], 16, 100, verbose=0)


if __name__ == "__main__":
    with last.words():
        train()
