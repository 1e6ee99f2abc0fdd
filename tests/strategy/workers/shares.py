"""One worker whose first rank computes four times longer for each row than the other one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfscale
from tests.strategy.turns import DEADLINE, ME, take
from tfscale.analysis.telemetry import meetings
from tfscale.callbacks import Telemetry
from tfscale.strategy.batch import share_search

ROWS, SLOW = 40, 4


class Sleeps(layers.Layer):
    """Sleeps for each row of its inputs."""

    seconds = 0.0
    traced = 0

    def call(self, inputs):
        type(self).traced += 1

        def sleep(rows):
            time.sleep(type(self).seconds * float(rows))
            return np.float32(0)

        slept = tf.numpy_function(sleep, [tf.shape(inputs)[0]], tf.float32)
        slept.set_shape([])
        return inputs + tf.stop_gradient(slept)


def made(shares="auto", **settings):
    strategy = tfscale.ScaleStrategy("ring", shares=shares, deadline=DEADLINE, **settings)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([5]),
                Sleeps(),
                layers.Dense(4),
                layers.BatchNormalization(),
                layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    return strategy, model


def data():
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((4 * ROWS, 5)).astype("float32")
    return x, x.sum(1, keepdims=True)


def train(model, epochs, **how):
    x, y = data()
    return model.fit(x, y, batch_size=ROWS, epochs=epochs, verbose=0, shuffle=False, **how)


def follows():
    """Shares follow a worker that is slow, and then another one; one function serves all."""
    strategy, model = made()
    train(model, 1)
    traced = Sleeps.traced
    for slow, epochs in ((0, 10), (1, 30)):  # the second change waits for the end of a window
        Sleeps.seconds = 0.001 * (SLOW if slow == ME else 1)
        train(model, epochs)
        now = strategy.shares_of_batch()
        assert 0.1 < now[slow] < 0.3, (slow, now, strategy.balance.changes)
    assert len(strategy.balance.changes) >= 2 or ME > 0
    assert Sleeps.traced == traced, "a change of shares traces nothing anew"


def follows_late():
    """Shares follow a slow worker though sums are applied steps later, and change together."""
    strategy, model = made(sync=tfscale.sync.BoundedStaleness(3))
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(strategy.shares_of_batch())

    Sleeps.seconds = 0.001 * (SLOW if ME == 0 else 1)
    train(model, 12, callbacks=[Looks()])
    changes = [i for i in range(1, len(seen)) if seen[i] != seen[i - 1]]
    told = strategy.gathered_from_workers(np.array([len(changes), *changes[:1], *seen[-1]]))
    assert changes and (told[0] == told[1]).all(), told
    assert 0.1 < seen[-1][0] < 0.3, (seen[-1], strategy.balance.changes)


def follows_in_a_loop(**settings):
    """Shares follow a slow worker in a training loop of one's own."""
    strategy, model = made(**settings)
    optimizer = model.optimizer

    def step(x, y):
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((model(x, training=True) - y) ** 2, -1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=ROWS)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def whole(batch):
        strategy.run(step, args=batch)

    Sleeps.seconds = 0.001 * (SLOW if ME == 0 else 1)
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(ROWS).repeat(10)
    for batch in strategy.experimental_distribute_dataset(batches):
        whole(batch)
    assert 0.1 < strategy.shares_of_batch()[0] < 0.3, strategy.balance.changes


def follows_in_a_sharded_loop():
    """Shares follow a slow worker in such a loop if workers share the optimizer's state, too."""
    follows_in_a_loop(shard="optimizer")


def restarts():
    """Shares are in the backup, and the steps after a restart follow them at once."""
    restarts_with()


def restarts_late():
    """Shares are in the backup of a training with late sums, too."""
    restarts_with(sync=tfscale.sync.BoundedStaleness(3))


def restarts_with(**settings):
    folder = Path(os.environ["MEETING"]) / f"backup{len(settings)}"
    Sleeps.seconds = 0.001 * (SLOW if ME == 0 else 1)

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 12:
                raise InterruptedError

    strategy, model = made(**settings)
    backup = keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)
    with contextlib.suppress(InterruptedError):
        train(model, 20, callbacks=[backup, Stops()])
    before = strategy.shares_of_batch()
    assert before[0] < 0.3, before
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(self.model.distribute_strategy.shares_of_batch())

    strategy, model = made(**settings)
    backup = keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)
    train(model, 14, callbacks=[backup, Looks()])
    assert 1 <= len(seen) <= 8 and seen[0][0] < 0.35, seen[:2]


def names():
    """Telemetry says while a training runs who waits for whom, and what would help."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tfscale").addHandler(handler)
    Sleeps.seconds = 0.002 * (SLOW if ME == 1 else 1)
    _, model = made(shares=None)
    file = Path(os.environ["MEETING"]) / "run.jsonl"
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(any("The others wait for rank 1" in line for line in lines))

    meetings.FIRST = 6
    train(model, 3, callbacks=[Telemetry(file), Looks()])
    assert (True in seen[:9]) == (ME == 0), (seen, lines)
    written = map(json.loads, file.with_name(f"run.rank{ME}.jsonl").read_text().splitlines())
    told = [line for line in written if line["kind"] == "straggler"]
    assert told and told[-1]["worker"] == "rank 1", told
    assert told[-1]["shares_save"] > 0.2 > told[-1]["bound_saves"], told
    # One worker alone has the callback: the others must not be waited for.
    train(model, 1, callbacks=[Telemetry()] if ME == 0 else [])


def says():
    """The log, ``explain()`` and telemetry tell of a change."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tfscale").addHandler(handler)
    Sleeps.seconds = 0.001 * (SLOW if ME == 0 else 1)
    strategy, model = made()
    train(model, 10)
    told = [line for line in lines if line.startswith("shares: after")]
    assert bool(told) == (ME == 0), lines
    assert strategy.shares_of_batch()[0] < 0.3
    assert "of the rows of each batch, as measured" in str(strategy.explain()).replace("\n", " ")


CASES = {
    case.__name__: case
    for case in (
        *(follows, follows_late, follows_in_a_loop, follows_in_a_sharded_loop),
        *(restarts, restarts_late, says, names),
    )
}


def check(strategy, name):
    """Make one of these checks."""
    share_search.FIRST_WINDOW = 3
    CASES[name]()


if __name__ == "__main__":
    take(check, "ring")
