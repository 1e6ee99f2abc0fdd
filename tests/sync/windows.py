"""Checks of files that are written in the middle of a window, for any layout of four devices.

A check is a function of ``make`` and of a folder: ``make(sync=..., replicas=4)`` gives a strategy.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.sync import simulation
from tests.sync.checks import Stop, fit, of_steps, regression, same
from tests.sync.simulation import BATCH, RATE, Momentum, Training
from tfscale import sync

WINDOW, ROUND, STOP = 3, 5, 8  # a window's end and a round's come before, and not at once
SAMPLES = STOP * BATCH

# Rules, on how many replicas, how many of which are alone, and how many of these make one of them.
RULES = {
    "every step": (sync.EveryStep(), 2, 1, 2),
    "local SGD": (sync.LocalSGD(ROUND), 2, 2, 1),
    "local SGD of four": (sync.LocalSGD(ROUND), 4, 4, 1),
    "groups": (sync.Hierarchical(outer=sync.LocalSGD(ROUND), group=2), 4, 2, 2),
}
ONE_DEVICE = "one device"


class Accumulating(Momentum):
    """Keras's SGD, which makes a step in the last step of a window."""

    count, sums = 0, (0.0, 0.0)

    def apply(self, weights, gradients):
        self.count += 1
        self.sums = [s + g for s, g in zip(self.sums, gradients, strict=True)]
        if self.count % WINDOW:
            return weights
        means, self.sums = [s / WINDOW for s in self.sums], [0.0, 0.0]
        return super().apply(weights, means)


def training_of(rule, strategy):
    """Simulate a rule in numpy."""
    _, _, alone, devices = RULES.get(rule, (None, 1, 1, 1))
    training = Training(alone, of_steps(ROUND), simulation.take_mean, devices=devices)
    training.inner = [Accumulating(RATE, 0.9) for _ in range(alone)]
    training.workers = 1 if rule == ONE_DEVICE else strategy.extended._num_workers
    return training


def steps(training, first, last, begins=0):
    """Make some steps, counted from the training's first; rounds begin with step ``begins``."""
    x, y = simulation.problem(SAMPLES)
    for step in range(first, last):
        rows = slice(step % STOP * BATCH, (step % STOP + 1) * BATCH)
        training.step(x[rows], y[rows])
        if (step + 1 - begins) % ROUND == 0:
            training.end(training)


def continued(written, read):
    """The one goes on with means of what replicas of the other have."""
    mean = written.mean()
    momenta, sums = (
        [np.mean(parts, 0) for parts in zip(*(getattr(one, name) for one in written.inner))]
        for name in ("kept", "sums")
    )
    read.weights = [[w.copy() for w in mean] for _ in read.weights]
    for one in read.inner:
        one.kept, one.sums, one.count = list(momenta), list(sums), written.inner[0].count


def accumulating():
    return keras.optimizers.SGD(RATE, momentum=0.9, gradient_accumulation_steps=WINDOW)


def taken_up(writer, reader):
    """Written by one rule and read by another: the window goes on with the sum that it had."""

    def check(make, folder):
        rule, replicas, *_ = RULES[writer]
        model = regression(strategy := make(rule, replicas=replicas), accumulating)
        with pytest.raises(InterruptedError):
            fit(model, samples=SAMPLES, callbacks=[Stop(STOP)])
        file, point = str(folder / "model.keras"), str(folder / "point")
        model.save(file)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(point)
        written = training_of(writer, strategy)
        steps(written, 0, STOP)
        expected = training_of(reader, strategy)
        continued(written, expected)
        steps(expected, STOP, 2 * STOP, begins=STOP if writer == "every step" else 0)
        for name, load in (("a file", from_file), ("a checkpoint", from_checkpoint)):
            loaded = load(make, reader, file if name == "a file" else point)
            fit(loaded, samples=SAMPLES)
            same(loaded, expected.mean(), atol=3e-6, err_msg=name)

    return check


def from_file(make, reader, path):
    if reader == ONE_DEVICE:
        return keras.models.load_model(path)
    rule, replicas, *_ = RULES[reader]
    with make(rule, replicas=replicas).scope():
        return keras.models.load_model(path)


def from_checkpoint(make, reader, path):
    if reader == ONE_DEVICE:
        strategy = tf.distribute.get_strategy()
    else:
        rule, replicas, *_ = RULES[reader]
        strategy = make(rule, replicas=replicas)
    model = regression(strategy, accumulating)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
    return model


def begun_together(make, folder):
    """The synchronous start of a training ends in the middle of a window."""
    start = WINDOW + 1
    strategy = make(sync.LocalSGD(ROUND, start=start), replicas=2)
    model = regression(strategy, accumulating)
    samples = 2 * WINDOW * BATCH
    fit(model, samples=samples)
    x, y = simulation.problem(samples)
    training = training_of("local SGD", strategy)
    together = training_of("every step", strategy)
    for step in range(2 * WINDOW):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        (together if step < WINDOW else training).step(x[rows], y[rows])
        if step == WINDOW - 1:
            continued(together, training)
    same(model, training.mean())


CHECKS = {
    f"{writer} to {reader}": taken_up(writer, reader)
    for writer, reader in itertools.product(RULES, [*RULES, ONE_DEVICE])
}
CHECKS[begun_together.__name__] = begun_together
