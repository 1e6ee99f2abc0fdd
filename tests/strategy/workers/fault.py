"""A worker of a fit, in which one worker (VICTIM) fails in one WAY after some steps.

Prints EVENT at the failure, and REACHED at the same step of the others; ERROR with what this
worker was told, and BATCH where data was waited for. Some wait for a file, GO, as those do that
are BUSY.
"""

import json
import os
import pathlib
import random
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.strategy.workers import last
from tfscale.tools.bench.measure import leave

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
WAY, VICTIM = os.environ["WAY"], int(os.environ["VICTIM"])
WAITS = WAY == "kill while others wait for data" and ME != VICTIM
FAILING, LAST = 12, 40
STEPS_OF_A_BATCH = 2  # each of two workers takes half of it


class Finished(Exception):
    """Exit of a worker whose program is done, whatever others do."""


def end_by(number):
    last.event()
    os.kill(os.getpid(), number)


def fail():
    if WAY == "kill while others wait for data":
        pathlib.Path(os.environ["GO"]).touch()
    if WAY in ("kill", "kill while others wait for data"):
        end_by(signal.SIGKILL)
    if WAY == "stop":
        end_by(signal.SIGSTOP)
    if WAY == "stop in a step":
        threading.Timer(random.uniform(0.001, 0.02), end_by, [signal.SIGSTOP]).start()
        return
    last.event()
    if WAY == "raise":
        raise KeyError("no such row")
    if WAY.startswith("exit "):
        sys.exit(int(WAY.removeprefix("exit ")))
    if WAY == "end":
        raise Finished
    if WAY == "end at once":
        os._exit(5)
    if WAY == "slow":
        wait_to_go()


def wait_to_go():
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.05)


class Fault(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == FAILING:
            fail() if ME == VICTIM else print("\nREACHED", flush=True)
            if str(ME) in os.environ.get("BUSY", ""):
                wait_to_go()


def data():
    """Return endless data of each worker."""

    def batches():
        rng = np.random.default_rng(ME)
        for step in range(10**9):
            if WAITS and step == FAILING // STEPS_OF_A_BATCH:
                wait_to_go()
                time.sleep(1)  # of which the other needs a moment, to die
                print(f"\nBATCH {time.time()}", flush=True)
            if WAY == "data" and ME == VICTIM and step == FAILING:
                last.event()
                raise FileNotFoundError("no such shard")
            x = rng.standard_normal((8, 4), np.float32)
            yield x, x.sum(1, keepdims=True)

    spec = (tf.TensorSpec([8, 4]), tf.TensorSpec([8, 1]))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_generator(batches, output_signature=spec).with_options(options)


def train():
    strategy = tfscale.ScaleStrategy(
        deadline=float(os.environ["DEADLINE"]),
        slow_after=float(os.environ["SLOW_AFTER"]),
        backend=os.environ.get("BACKEND", "engine"),
        shard=os.environ.get("SHARD"),
        sync=eval(os.environ["SYNC"], vars(tfscale.sync)) if "SYNC" in os.environ else None,
    )
    if WAY == "kill while others make variables" and ME == VICTIM:
        end_by(signal.SIGKILL)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile(os.environ.get("OPTIMIZER", "sgd"), "mse")
    steps = LAST if WAY == "slow" else 10**6
    model.fit(data(), steps_per_epoch=steps, verbose=0, callbacks=[Fault()])


def main():
    with last.words():
        try:
            train()
        except Finished:
            return
    print("\nDONE", flush=True)


if __name__ == "__main__":
    main()
    if WAY != "end":
        leave(os.environ["MEETING"], "worker", ME, 2)
