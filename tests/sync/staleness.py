"""Checks of bounded staleness, for any layout. A check is a function of ``make`` and of a folder.

``make(sync=..., **settings)`` gives a strategy; every worker has a folder of its own.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import random
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfscale
from tests.sync import simulation
from tests.sync.checks import (
    Middle,
    Stop,
    agree,
    fit,
    generated,
    regression,
    replicas,
    same,
    with_much_to_say,
)
from tests.sync.simulation import BATCH, FEATURES, OUTPUTS, RATE, Momentum
from tfscale import sync
from tfscale.analysis.telemetry import stragglers
from tfscale.callbacks import Telemetry
from tfscale.compression import PowerSGD, WirePolicy
from tfscale.compression.method import RESIDUAL

BOUND = 3


class Delayed:
    """Training on one device, in numpy, that applies gradients ``bound`` steps late."""

    def __init__(self, bound, momentum=0.9):
        self.weights = [w.astype("float64") for w in simulation.beginning()]
        self.bound, self.inner, self.pending = bound, Momentum(RATE, momentum), []

    def run(self, steps, samples=72):
        x, y = simulation.problem(samples)
        in_epoch = -(-samples // BATCH)
        for step in steps:
            rows = slice(step % in_epoch * BATCH, (step % in_epoch + 1) * BATCH)
            self.pending.append(simulation.gradient(self.weights, x[rows], y[rows]))
            self._apply(self.bound)
        return self

    def catch_up(self):
        self._apply(0)
        return self.weights

    def _apply(self, left):
        while len(self.pending) > left:
            self.weights = self.inner.apply(self.weights, self.pending.pop(0))


def flags_of(model):
    return list(model.distribute_strategy.rounds.of(model).state.flags.values())


# ---- number by number


def late(make, folder):
    """All replicas apply each sum ``bound`` steps late, also that of a batch of a single row."""
    for bound, samples in ((1, 72), (BOUND, 65)):
        model = regression(make(sync.BoundedStaleness(bound)))
        fit(model, 2, samples=samples)
        same(model, Delayed(bound).run(range(18), samples).catch_up())
        for flags in flags_of(model):
            # The first steps lack fewer sums, since nothing is on its way before.
            assert flags.staleness.numpy().tolist() == [1] * bound + [18 - bound]
        assert int(model.optimizer.iterations.numpy()) == 18
        agree(model)


def more_late_than_long(make, folder):
    """The end of ``fit`` applies all sums, though no step has applied one."""
    model = regression(make(sync.BoundedStaleness(16)))
    fit(model)
    same(model, Delayed(16).run(range(9)).catch_up())


def synchronous(make, folder):
    """A bound of 0 is ``EveryStep``, bit for bit."""

    def trained(rule):
        model = with_much_to_say(make(rule))
        history = fit(model, 2, samples=65, validation_split=0.2).history
        return [w.tobytes() for w in model.get_weights()], history

    keras.utils.set_random_seed(1)
    expected = trained(sync.EveryStep())
    keras.utils.set_random_seed(1)
    assert trained(sync.BoundedStaleness(0)) == expected


def repeated(make, folder):
    """A training that is repeated gives the same bits."""

    def trained():
        keras.utils.set_random_seed(1)
        model = with_much_to_say(make(sync.BoundedStaleness(BOUND), wire="int8"))
        fit(model, 2, validation_split=0.2)
        return [w.tobytes() for w in model.get_weights()]

    assert trained() == trained()


# ---- who looks at the weights


def looked_at(make, folder):
    """A look at the weights applies all sums first; training then continues from there."""
    x, y = simulation.problem()
    looks = {
        "read": lambda model: model.get_weights(),
        "evaluated": lambda model: model.evaluate(x, y, verbose=0),
        "predicted": lambda model: model.predict(x, verbose=0),
    }
    for name, look in looks.items():
        model = regression(make(sync.BoundedStaleness(BOUND)))
        look(model)  # traces evaluations before any step of training is
        middle = Middle(look, 5)
        fit(model, callbacks=[middle])
        training = Delayed(BOUND).run(range(5))
        kernel, bias = training.catch_up()
        outputs = x @ kernel + bias
        expected = {"read": [kernel, bias], "evaluated": np.mean((outputs - y) ** 2)}
        for found, number in zip(
            tf.nest.flatten(middle.seen), tf.nest.flatten(expected.get(name, outputs)), strict=True
        ):
            np.testing.assert_allclose(found, number, rtol=1e-5, atol=1e-5, err_msg=name)
        same(model, training.run(range(5, 9)).catch_up(), err_msg=name)
        agree(model)


def assigned(make, folder):
    """Sums of the gradients of weights that were replaced are dropped."""
    ones = [np.ones_like(w) for w in simulation.beginning()]

    def assign(model):
        for variable, value in zip(model.weights, ones, strict=True):
            variable.assign(value)

    model = regression(make(sync.BoundedStaleness(BOUND)))
    fit(model, callbacks=[Middle(assign, 5)])
    training = Delayed(BOUND).run(range(5))
    training.pending, training.weights = [], ones
    same(model, training.run(range(5, 9)).catch_up())


class LowersRate(keras.callbacks.Callback):
    """Changes the learning rate after each batch, without a look at the weights."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = RATE * 0.9 ** (batch + 1)


def with_another_rate_in_each_step(make, folder):
    """The rate of the step that applies a sum counts, on all replicas."""
    model = regression(make(sync.BoundedStaleness(2)), lambda: keras.optimizers.SGD(RATE))
    fit(model, callbacks=[LowersRate()])
    training = Delayed(2, momentum=0)
    for step in range(9):
        training.inner.rate = RATE * 0.9**step
        training.run([step])
    training.inner.rate = RATE * 0.9**9
    same(model, training.catch_up())


# ---- files


def taken_up_again(make, folder):
    """A file that is read continues the training as if nothing had interrupted it."""
    file, point = str(folder / "model.keras"), str(folder / "point")

    def save(model):
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(point)
        model.save(file)

    def from_keras(strategy):
        with strategy.scope():
            return keras.models.load_model(file)

    def from_checkpoint(strategy):
        model = regression(strategy)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(point)
        return model

    model = regression(make(sync.BoundedStaleness(BOUND)))
    with pytest.raises(InterruptedError):
        fit(model, callbacks=[Middle(save, 5), Stop(7)])
    training = Delayed(BOUND).run(range(5))
    training.catch_up()
    expected = training.run(range(9)).catch_up()
    for read in (from_keras, from_checkpoint):
        restored = read(make(sync.BoundedStaleness(BOUND)))
        assert int(restored.optimizer.iterations.numpy()) == 5, read
        fit(restored)
        same(restored, expected, atol=3e-6, err_msg=str(read))
        agree(restored)


def backup(make, folder):
    """A training that ``BackupAndRestore`` restarts ends as one that nothing has interrupted."""
    steps = 27

    def trained(name, stop):
        strategy = make(sync.BoundedStaleness(BOUND), wire="bf16")
        model = regression(strategy, "adam")
        own = keras.callbacks.BackupAndRestore(folder / name, delete_checkpoint=False)
        fit(model, 3, callbacks=[own, *([Stop(stop)] if stop else [])])
        assert int(model.optimizer.iterations.numpy()) == steps
        return [w.tobytes() for w in model.get_weights()]

    expected = trained("whole", 0)
    with pytest.raises(InterruptedError):
        trained("interrupted", 14)
    assert trained("interrupted", 0) == expected


# ---- programs


class OwnStep(keras.Model):
    """A user's model, whose step applies gradients by itself."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(OUTPUTS)
        self.head.build([None, FEATURES])
        self.built = True

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        )
        return {"loss": loss}


def own_step(make, folder):
    """A model with a ``train_step`` of its own trains like another one."""
    with make(sync.BoundedStaleness(BOUND)).scope():
        model = OwnStep()
        model.compile(keras.optimizers.SGD(RATE, momentum=0.9))
    model.set_weights(simulation.beginning())
    fit(model)
    same(model, Delayed(BOUND).run(range(9)).catch_up())


def programs(make, folder):
    """Keras's defaults and what strangers do: all replicas end with the same weights."""
    how = {
        "eager": ({"run_eagerly": True}, {}),
        "several steps": ({"steps_per_execution": 2}, {}),
        "last batch of one row": ({}, {"samples": 65}),
        "validation": ({"metrics": ["mae"]}, {"validation_split": 0.2}),
    }
    for name, (compiled, fitted) in how.items():
        model = regression(make(sync.BoundedStaleness(2)), "adam", **compiled)
        history = fit(model, 2, **fitted).history
        assert np.isfinite(history["loss"]).all(), name
        fit(model, 1, **fitted)
        agree(model)


def optimizers(make, folder):
    """Ours and Keras's, with clipping, averages of weights and measured curvature."""
    every = {
        "LAMB": lambda: tfscale.optimizers.LAMB(0.01),
        "AdaHessian": lambda: tfscale.optimizers.AdaHessian(0.05),
        "AdamW": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=1.0, use_ema=True),
    }
    for name, optimizer in every.items():
        model = regression(make(sync.BoundedStaleness(2)), optimizer)
        losses = fit(model, 4, samples=65).history["loss"]
        assert losses[-1] < losses[0], (name, losses)
        agree(model)


def with_statistics(make, folder):
    """Batch normalization's statistics are each replica's own until somebody looks."""
    model = with_much_to_say(make(sync.BoundedStaleness(2)))
    losses = fit(model, 4, samples=65, validation_split=0.2).history["loss"]
    assert losses[-1] < losses[0]
    agree(model)
    moving = [v.value.values for v in model.non_trainable_variables if "moving" in v.path]
    assert len(moving) == 2
    for first, *others in moving:
        assert all(np.array_equal(first.numpy(), other.numpy()) for other in others)


def on_a_wire(make, folder):
    """All that replicas have given is in the weights or in residuals, whatever is on its way."""
    wire = WirePolicy("int8", small=0)
    strategy = make(sync.BoundedStaleness(BOUND), wire=wire, error_feedback=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input([FEATURES]), layers.Dense(OUTPUTS, use_bias=False)])
        model.compile(keras.optimizers.SGD(RATE), lambda y, outputs: tf.reduce_sum(outputs, -1))
    (before,), (x, _) = model.get_weights(), simulation.problem()
    steps = 18
    fit(model, 2)
    agree(model)
    (kept,) = model.optimizer._tfscale_memory.named(RESIDUAL).values()
    each = [v.numpy() for v in kept.values]
    assert all(np.any(lost) for lost in each)
    if strategy.extended._num_workers > 1:
        return
    lost = sum(each)
    given = np.repeat(2 * x.sum(0)[:, np.newaxis], OUTPUTS, 1)  # of two epochs, times rows
    applied = (before - model.get_weights()[0]) / RATE * BATCH
    assert int(model.optimizer.iterations.numpy()) == steps
    np.testing.assert_allclose(applied + lost, given, rtol=0, atol=1e-3)
    assert np.abs(applied - given).max() > 1e-3  # the wire does round


def explained(make, folder):
    """The table says what travels behind steps; figures say how late and who waits."""
    model = regression(strategy := make(sync.BoundedStaleness(BOUND)))
    fit(model)
    said = " ".join(str(strategy.explain()).split())
    assert "gradients behind steps 0: head/bias" in said and "3 steps late" in said, said
    figures = strategy.rounds.figures()
    assert figures["staleness"] == [1, 1, 1, 6] and 0 <= figures["hidden"] <= 1, figures
    assert len(figures["waits"]) == replicas(strategy), figures


def refused(make, folder):
    """An unsupported program raises an error that says what to do."""
    rule = sync.BoundedStaleness(BOUND)
    windows = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)  # noqa: E731
    curvature = lambda: tfscale.optimizers.AdaHessian(0.1, update_each=2)  # noqa: E731
    scaling = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))  # noqa: E731
    for optimizer, words in (
        (windows, "does not accumulate gradients.*gradient_accumulation_steps"),
        (curvature, "AdaHessian measures curvature in one of 2 steps only"),
        (scaling, "LossScaleOptimizer.*mixed_bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            fit(regression(make(rule), optimizer))
    with pytest.raises(ValueError, match="PowerSGD.* more than one exchange.*the bound"):
        make(rule, method=PowerSGD(2))
    with pytest.raises(ValueError, match="shard='optimizer'"):
        make(rule, shard="optimizer")
    if (strategy := make(rule)).extended._num_workers > 1:
        with pytest.raises(ValueError, match="equal numbers of batches.*Pass steps_per_epoch"):
            regression(strategy).fit(generated(strategy, [3, 6]), epochs=2, verbose=0)


# ---- how late

RATES = np.linspace(0.95, 1.05, 41)


class Quadratic(layers.Layer):
    """The loss sum_i curvature_i w_i**2 / 2, whatever the inputs."""

    def __init__(self, curvatures):
        super().__init__()
        self.curvatures = np.asarray(curvatures, "float32")

    def build(self, shape):
        self.errors = self.add_weight(shape=self.curvatures.shape, initializer="ones")

    def call(self, inputs):
        loss = tf.reduce_sum(self.curvatures * self.errors**2) / 2
        return inputs[:, 0] * 0 + loss


def measured_limit(make, bound, steps):
    """Return the least curvature whose error grows, with a learning rate of 1."""
    curvatures = sync.stable_rate(bound) * RATES
    rule = sync.BoundedStaleness(bound)
    with make(rule).scope():
        model = keras.Sequential([keras.Input([1]), Quadratic(curvatures)])
        model.compile(
            keras.optimizers.SGD(1.0), loss=lambda y, x: x, steps_per_execution=steps // 4
        )
    data = tf.data.Dataset.from_tensors((np.zeros([2, 1], "float32"), np.zeros([2], "float32")))
    errors = []
    for _ in range(3):
        model.fit(data.repeat(), steps_per_epoch=steps, verbose=0)
        errors.append(np.abs(model.get_weights()[0]))
    grows = errors[2] > errors[1]
    return curvatures[grows].min() if grows.any() else np.inf


def stability(bounds, make, folder):
    """The measured limit of plain SGD's rate is that of the formula."""
    for bound in bounds:
        found, expected = measured_limit(make, bound, 400 + 200 * bound), sync.stable_rate(bound)
        assert abs(found / expected - 1) < 0.02, (bound, found, expected)


LIMITS = {"": (0, 1, 4), " of all delays": (0, 1, 2, 4, 8, 16)}


class Counters:
    """Numbers of steps that workers have begun, in memory that all workers of a host share."""

    def __init__(self, path, workers):
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * workers)
        self.numbers = np.frombuffer(self._map, np.int64)


class Wanders(keras.callbacks.Callback):
    """Sleeps at random before steps, and notes how far ahead of the slowest its worker is."""

    def __init__(self, counters, worker, seconds):
        super().__init__()
        self.counts, self.worker, self.seconds = counters.numbers, worker, seconds
        self.dice, self.most = random.Random(worker), 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.dice.random() < 0.1:
            time.sleep(self.dice.uniform(0, self.seconds))
        self.counts[self.worker] += 1  # a step that has begun
        self.most = max(self.most, int(self.counts[self.worker] - self.counts.min()))


def never_later_than_the_bound(steps, seconds, make, folder):
    """However long workers sleep, none is more than ``bound`` steps ahead of the slowest."""
    strategy = make(sync.BoundedStaleness(BOUND))
    workers, worker = strategy.extended._num_workers, strategy.extended._id_in_cluster
    path = Path(os.environ["MEETING"]) / f"staleness-{steps}"  # a folder of all workers
    counts = np.zeros(workers, np.int64).tobytes()
    if worker == 0:
        path.with_suffix(".new").write_bytes(counts)
        path.with_suffix(".new").rename(path)
    agree(regression(strategy))  # all workers have come
    wanders = Wanders(Counters(path, workers), worker, seconds)
    # The rate of the other checks is not stable with momentum and late sums.
    model = regression(strategy, lambda: keras.optimizers.SGD(0.01))
    epochs = -(-steps // 9)
    x, y = simulation.problem()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    model.fit(data, steps_per_epoch=9 * epochs, callbacks=[wanders], verbose=0)
    agree(model)
    assert wanders.most <= BOUND + 1, wanders.most  # the slowest may not have begun its next one
    for flags in flags_of(model):
        late = flags.staleness.numpy()
        assert late.sum() == 9 * epochs and len(late) == BOUND + 1
    if worker == 0:
        path.unlink()


DISTANCES = {"": (300, 0.02), " in many steps": (10_000, 0.005)}


class Sleeps(layers.Layer):
    """Takes ``seconds`` of this process for each row."""

    seconds = 0.0

    def call(self, inputs):
        def sleep(rows):
            time.sleep(self.seconds * float(rows))
            return np.float32(0)

        slept = tf.numpy_function(sleep, [tf.shape(inputs)[0]], tf.float32)
        slept.set_shape([])
        return inputs + tf.stop_gradient(slept)


def fit_with_a_slow_worker(strategy, steps, **how):
    """Train a model whose steps the first worker makes slowly."""
    with strategy.scope():
        model = keras.Sequential([keras.Input([FEATURES]), Sleeps(), layers.Dense(OUTPUTS)])
        model.compile("sgd", "mse")
    x, y = simulation.problem()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4 * BATCH).repeat()
    Sleeps.seconds = 0.01 if strategy.extended._id_in_cluster == 0 else 0.0
    model.fit(data, steps_per_epoch=steps, verbose=0, **how)
    agree(model)
    return model


def left_out(make, folder):
    """The worker that others wait for leaves out batches; all end with the same weights."""
    steps = 120
    strategy = make(sync.BoundedStaleness(BOUND, skips=True))
    model = fit_with_a_slow_worker(strategy, steps)
    skipped = strategy.rounds.figures()["skipped"]
    assert (skipped > steps / 4) == (strategy.extended._id_in_cluster == 0), skipped
    assert int(model.optimizer.iterations.numpy()) == steps


def named(make, folder):
    """Lines of telemetry name the worker that others wait for, under any rule."""
    for number, rule in enumerate((sync.EveryStep(), sync.BoundedStaleness(BOUND))):
        files = Path(os.environ["MEETING"]) / f"named{number}.jsonl"  # a folder of all workers
        fit_with_a_slow_worker(make(rule), 20, callbacks=[Telemetry(files)])
        found = stragglers(sorted(files.parent.glob(f"{files.stem}.rank*.jsonl")))
        assert found.slowest == 0 and found.workers[0] == "rank 0", (rule, str(found))
        assert "The others wait for rank 0" in str(found), str(found)
        assert found.with_shares() < found.seconds


def warned_of_rates(make, folder):
    """A plain SGD whose rate is beyond the limit is warned of, if the curvature is known."""
    rule = sync.BoundedStaleness(4, curvature=10.0)
    limit = sync.stable_rate(4, 10.0)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("tfscale")
    log.addHandler(handler)
    try:
        for optimizer, warns in (
            (lambda: keras.optimizers.SGD(1.1 * limit), True),
            (lambda: keras.optimizers.SGD(0.9 * limit), False),
            (lambda: keras.optimizers.Adam(1.0), False),
        ):
            said.clear()
            fit(regression(make(rule), optimizer))
            told = [line for line in said if "diverges" in line]
            assert len(told) == warns and all("0.0347" in line for line in told), said
    finally:
        log.removeHandler(handler)


def each(check, cases):
    return {check.__name__ + name: functools.partial(check, *case) for name, case in cases.items()}


CHECKS = {
    check.__name__: check
    for check in (
        late,
        more_late_than_long,
        synchronous,
        repeated,
        looked_at,
        assigned,
        with_another_rate_in_each_step,
        taken_up_again,
        backup,
        own_step,
        programs,
        optimizers,
        with_statistics,
        on_a_wire,
        explained,
        refused,
        left_out,
        named,
        warned_of_rates,
    )
}
CHECKS |= each(stability, {name: (bounds,) for name, bounds in LIMITS.items()})
CHECKS |= each(never_later_than_the_bound, DISTANCES)
