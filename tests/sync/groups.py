"""Checks of groups, for any layout of four replicas, of which two make a group.

A check is a function of ``make`` and of a folder: ``make(sync=..., **settings)`` gives a strategy.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.sync import checks, simulation
from tests.sync.checks import (
    EachStep,
    Middle,
    Stop,
    Traffic,
    agree,
    each,
    fit,
    fit_masked_words,
    of_steps,
    regression,
    same,
    with_much_to_say,
)
from tests.sync.simulation import BATCH, FEATURES, OUTPUTS, Momentum, Stream, Training
from tfscale import compression, sync
from tfscale.optimizers import AdaHessian

GROUPS, SIZE = 2, 2

grouped = functools.partial(sync.Hierarchical, group=SIZE)


def simulated(rule, end, settle=None):
    """Two groups do what two replicas do, also with a last batch of one row."""
    return _simulated(rule, lambda: Training(GROUPS, of_steps(4), end(), settle, devices=SIZE))


def _simulated(rule, make_training):
    def check(make, folder):
        strategy = make(grouped(outer=rule()))
        model = regression(strategy)
        expected = make_training()
        expected.workers = strategy.extended._num_workers
        fit(model, 2, samples=65)
        same(model, expected.run(2, samples=65))
        agree(model)

    return check


def nesterov():
    return simulation.outer_step(Momentum(0.7, 0.9, True))


NUMBERS = {
    "local_sgd": simulated(lambda: sync.LocalSGD(4), lambda: simulation.take_mean),
    "diloco": simulated(lambda: sync.DiLoCo(4), nesterov),
    "elastic": simulated(
        lambda: sync.ElasticAveraging(4, alpha=0.2),
        lambda: simulation.elastic(0.2),
        simulation.take_centre,
    ),
    "fragments": _simulated(
        lambda: sync.DiLoCo(4, fragments=2),
        lambda: Stream([[0], [1]], 0, 0.0).training(GROUPS, 2, devices=SIZE),
    ),
    "stream": _simulated(  # whose end comes while something is in flight
        lambda: sync.DiLoCo(8, fragments=2, delay=3, blend=0.25),
        lambda: Stream([[0], [1]], 3, 0.25).training(GROUPS, 4, devices=SIZE),
    ),
}


def normalized(strategy, optimizer):
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input([FEATURES]), layers.Dense(16, use_bias=False),
            layers.BatchNormalization(), layers.Activation("relu"), layers.Dense(OUTPUTS),
        ])  # fmt: skip
        model.compile(optimizer(), "mse", metrics=["mae"])
    return model


def rows_of_groups(samples, workers):
    """Rows of each batch, in the order in which groups hold them."""
    training = Training(GROUPS, None, None, devices=SIZE)
    training.workers = workers
    batches = [(first, min(BATCH, samples - first)) for first in range(0, samples, BATCH)]
    parts = [
        first + training.part_of(device, rows)
        for first, rows in batches
        for device in range(GROUPS * SIZE)
    ]
    return np.concatenate(parts)


LARGER = {  # optimizer, and rows: a last batch of three or of one leaves a group fewer, or none
    " with one row": (lambda: keras.optimizers.Adam(0.01, global_clipnorm=1.0), 65),
    " accumulating with three rows": (
        lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        67,
    ),
    " with three rows": (lambda: keras.optimizers.Adam(0.01, global_clipnorm=1.0), 67),
    " accumulating with one row": (
        lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        65,
    ),
}


def as_one_larger_replica(case, make, folder):
    """Groups train as replicas of their size, with batch normalization and a validation."""
    optimizer, samples = case
    held = simulation.problem(seed=5)
    trained = []
    for rule, devices in ((grouped(outer=sync.LocalSGD(4)), 4), (sync.LocalSGD(4), 2)):
        strategy = make(rule, replicas=devices)
        model, (x, y) = normalized(strategy, optimizer), simulation.problem(samples)
        if devices == GROUPS:
            order = rows_of_groups(samples, strategy.extended._num_workers)
            x, y = x[order], y[order]
        how = {"shuffle": False, "verbose": 0, "validation_data": held}
        history = model.fit(x, y, batch_size=BATCH, epochs=2, **how).history
        trained.append((model.get_weights(), history))
    (found, histories), (expected, others) = trained
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    for key, values in histories.items():
        np.testing.assert_allclose(values, others[key], rtol=1e-4, err_msg=key)


def same_bits_within_a_group(make, folder):
    """Weights and statistics agree within a group in the middle of a round; groups differ."""
    strategy = make(grouped(outer=sync.LocalSGD(100)))
    model, look = normalized(strategy, lambda: keras.optimizers.Adam(0.01)), Middle(bits, 6)
    fit(model, callbacks=[look])
    own = look.seen
    for first in range(0, len(own), SIZE):
        assert len(set(own[first : first + SIZE])) == 1
    assert len(set(own)) == len(own) // SIZE
    agree(model)


def curvature_of_a_group(make, folder):
    """AdaHessian's is summed over the group; in the last step one has no rows."""
    found = []
    for rule, devices in ((grouped(outer=sync.LocalSGD(4)), 4), (sync.LocalSGD(4), 2)):
        strategy = make(rule, replicas=devices)
        model = regression(strategy, lambda: AdaHessian(0.05, epsilon=0.1, update_each=2))
        x, y = simulation.problem(65)
        if devices == GROUPS:
            order = rows_of_groups(65, strategy.extended._num_workers)
            x, y = x[order], y[order]
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def bits(model):
    """Return the bits of the weights and statistics of each replica of this process."""
    every = [v.value for v in model.variables if "float" in v.dtype]
    replicas = range(len(every[0].values))
    return [b"".join(v.values[r].numpy().tobytes() for v in every) for r in replicas]


def one_group_or_one_replica(make, folder):
    """All in one group are synchronous; groups of one are replicas."""

    def trained(rule):
        model = regression(make(rule))
        fit(model, 2)
        return model

    outer = sync.DiLoCo(4)
    pairs = [(4, sync.EveryStep()), (1, outer)]
    for size, rule in pairs:
        found = trained(sync.Hierarchical(outer=outer, group=size))
        same(found, trained(rule).get_weights(), err_msg=repr(rule))


class Heard(EachStep):
    """Callback that counts the collectives of each step, over all replicas and within groups."""

    def _now(self):
        strategy = self.model.distribute_strategy
        own = strategy.rounds.teams.team
        return [_calls(strategy.extended.groups), _calls([own] if own else [])]


def _calls(groups):
    every = [one for group in groups for one in group.communicators]
    return sum(total.calls for one in every for total in one.totals().values())


SILENT = {
    " on a wire": sync.DiLoCo(4, wire="int8"),
    " of local SGD": sync.LocalSGD(4),
    " of a centre": sync.ElasticAveraging(4, 0.2),
}


def silence(rule, make, folder):
    """Between the ends of rounds groups send nothing to each other, and much within them."""
    strategy = make(grouped(outer=rule))
    model, heard = with_much_to_say(strategy), Heard()
    fit(model, 2, callbacks=[heard], sample_weight=np.ones(72, "float32"))
    for step, (between, within) in enumerate(heard.steps, 1):
        assert within > 0 and (between > 0) == (step % 4 == 0), (rule, step, between, within)
    assert "groups" in str(strategy.explain())


class Centred(layers.Layer):
    """Subtracts the mean over the rows of all replicas with which this one makes its step."""

    def call(self, x):
        return x - tf.reduce_mean(tf.distribute.get_replica_context().all_gather(x, 0), 0)

    def compute_output_shape(self, shape):
        return shape


def centred(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input([FEATURES]), layers.Dense(OUTPUTS), Centred()])
        model.compile("sgd", "mse")
    model.set_weights(simulation.beginning())
    return model


def gathered_in_a_synchronous_start(make, folder):
    """First from all, and then from nobody; gradients go back as far."""
    start, (x, y) = 4, simulation.problem()
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model = centred(make(sync.LocalSGD(4, start=start), replicas=2))
    model.fit(x, y, **how)
    synchronous = centred(make(sync.EveryStep(), replicas=2))
    synchronous.fit(x[: start * BATCH], y[: start * BATCH], **how)
    alone = centred(make(sync.LocalSGD(4), replicas=2))
    alone.set_weights(synchronous.get_weights())
    alone.fit(x[start * BATCH :], y[start * BATCH :], **how)
    same(model, alone.get_weights())


def gathered_by_a_layer(make, folder):
    """A layer gathers from its group, and from nobody if it is alone; gradients go back as far."""
    x, y = simulation.problem()
    trained = []
    for rule, devices in ((grouped(outer=sync.LocalSGD(4)), 4), (sync.LocalSGD(4), 2)):
        model = centred(strategy := make(rule, replicas=devices))
        order, watch = slice(None), Heard()
        if devices == GROUPS:
            order, watch = rows_of_groups(len(x), strategy.extended._num_workers), Traffic()
        how = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [watch]}
        model.fit(x[order], y[order], epochs=2, **how)
        for step, (between, _) in enumerate(watch.steps, 1):
            assert (between > 0) == (step % 4 == 0), (rule, step, between)
        trained.append(model)
    same(trained[0], trained[1].get_weights())


SENT = {
    " behind steps": {},
    " by int4": {"wire": "int4"},
    " by bf16": {"wire": {"head": "bf16"}},
    " by PowerSGD": {"method": compression.PowerSGD(2)},
    " by TopK": {"method": compression.TopK(0.5)},
}


def sent_otherwise(how, make, folder):
    """The strategy's wire or method is that within groups, and the rule's that between them; what
    the two have not sent yet are two things.
    """
    behind = {} if how else {"fragments": 2, "delay": 1}
    outer = sync.DiLoCo(4, outer=lambda: keras.optimizers.SGD(1.0), wire="int8", **behind)
    model = regression(make(grouped(outer=outer), **how))
    losses = fit(model, 3).history["loss"]
    assert losses[-1] < losses[0], (how, losses)
    agree(model)


PROGRAMS = {
    " of several steps": ({"steps_per_execution": 2}, {}),
    " eager": ({"run_eagerly": True, "metrics": ["mae"]}, {"samples": 82, "validation_split": 0.2}),
}


def programs(how, make, folder):
    """Replicas of strangers' programs end with the same weights."""
    compiled, fitted = how
    model = regression(make(grouped(outer=sync.DiLoCo(3))), "adam", **compiled)
    history = fit(model, 2, **fitted).history
    assert np.isfinite(history["loss"]).all()
    fit(model, 1, **fitted)
    agree(model)


def taken_up_again(make, folder):
    """Saved in the middle of a round: two groups, and one replica for each, go on from the mean."""
    outer = sync.DiLoCo(4)
    file = str(folder / "model.keras")
    model = regression(make(grouped(outer=outer)))
    with pytest.raises(InterruptedError):
        fit(model, callbacks=[Stop(6)])
    model.save(file)

    def continued(rule, devices):
        with (strategy := make(rule, replicas=devices)).scope():
            loaded = keras.models.load_model(file)
        fit(loaded)
        agree(loaded)
        assert strategy.num_replicas_in_sync == devices
        return loaded

    workers = model.distribute_strategy.extended._num_workers
    for rule, devices in ((grouped(outer=outer), 4), (outer, 2)):
        expected = interrupted_training(workers, devices // GROUPS)
        same(continued(rule, devices), expected, atol=3e-6, err_msg=repr(rule))


def a_replica_that_never_had_a_row(make, folder):
    fit_masked_words(make(grouped(outer=sync.LocalSGD(2))), rows=3)


def interrupted_training(workers, devices):
    """Six steps of groups, and then nine from their mean, of groups or of replicas."""
    training = Training(GROUPS, of_steps(4), nesterov(), devices=SIZE)
    training.workers = workers
    x, y = simulation.problem()
    steps = [slice(first, first + BATCH) for first in range(0, len(x), BATCH)]
    for step, rows in enumerate(steps[:6]):
        training.step(x[rows], y[rows])
        if step == 3:
            training.end(training)
    training.weights = [training.mean() for _ in training.weights]
    means = [np.mean(parts, 0) for parts in zip(*(one.kept for one in training.inner))]
    for one in training.inner:
        one.kept = [m.copy() for m in means]
    training.devices = devices
    for step, rows in enumerate(steps):
        training.step(x[rows], y[rows])
        if step in (1, 5, 8):
            training.end(training)
    return training.mean()


def between_groups(check):
    """Return a check in which groups follow a rule as replicas do."""

    def checked(make, folder):
        check(lambda rule: make(grouped(outer=rule)), folder)

    return checked


STREAMS = {
    name: between_groups(checks.CHECKS[name])
    for name in (
        "stream_of_programs",
        "stream_on_a_wire",
        "assigned_in_flight",
        "interrupted_in_flight",
        "interrupted_in_flight at the end of a round",
    )
}

CHECKS = (
    NUMBERS
    | STREAMS
    | each(as_one_larger_replica, LARGER)
    | each(silence, SILENT)
    | each(sent_otherwise, SENT)
    | each(programs, PROGRAMS)
    | {
        check.__name__: check
        for check in (
            curvature_of_a_group,
            same_bits_within_a_group,
            one_group_or_one_replica,
            gathered_by_a_layer,
            gathered_in_a_synchronous_start,
            taken_up_again,
            a_replica_that_never_had_a_row,
        )
    }
)
