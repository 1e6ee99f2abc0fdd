"""Checks of rules, for any layout. A check is a function of ``make`` and of a folder.

``make(sync=..., **settings)`` gives a strategy; every worker has a folder of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.sync import simulation
from tests.sync.simulation import (
    BATCH,
    FEATURES,
    OUTPUTS,
    RATE,
    Momentum,
    Stream,
    Training,
    of_steps,
)
from tfscale import sync
from tfscale.callbacks import Telemetry
from tfscale.collectives.gossip import random_graph
from tfscale.compression import Method, Staged, Wire, WirePolicy
from tfscale.compression.method import RESIDUAL

EXACT = {"rtol": 0, "atol": 1e-6}


def sample(cases, seldom, others=None, quick=()):
    """All cases: ``seldom`` in full runs only, and with a mark ``others`` what is not ``quick``."""

    def marks(case):
        if case in seldom:
            return [pytest.mark.full]
        return [others] if others and case not in quick else []

    return [pytest.param(case, marks=marks(case)) for case in cases]


def regression(strategy, optimizer=None, **how):
    with strategy.scope():
        model = keras.Sequential([keras.Input([FEATURES]), layers.Dense(OUTPUTS, name="head")])
        made = optimizer() if callable(optimizer) else optimizer
        model.compile(made or keras.optimizers.SGD(RATE, momentum=0.9), "mse", **how)
    model.set_weights(simulation.beginning())
    return model


def fit(model, epochs=1, samples=72, **how):
    x, y = simulation.problem(samples)
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | how
    return model.fit(x, y, epochs=epochs, **how)


def same(model, expected, **how):
    for found, number in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, number, **(EXACT | how))


def replicas(strategy):
    return strategy.num_replicas_in_sync


def on(strategy, training):
    """The training, whose replicas are in as many processes."""
    training.workers = strategy.extended._num_workers
    return training


# ---- number by number


def simulated(rule, make_training):
    def check(make, folder):
        strategy = make(rule())
        model = regression(strategy)
        fit(model, 2)
        same(model, on(strategy, make_training(replicas(strategy))).run(2))

    return check


def mixing(replicas, steps, rounds, **how):
    end = simulation.mix(rounds, **how)
    return Training(replicas, of_steps(steps), end, simulation.take_mean)


def as_bf16(x):
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float32).numpy()


def powers_of_two(replicas):
    steps = [step for step in (1, 2, 4) if step < replicas]
    return [[(r, (r + step) % replicas) for r in range(replicas)] for step in steps]


def neighbours(replicas):
    near = {(r, (r + step) % replicas) for r in range(replicas) for step in (1, -1)}
    return sorted(near)


def there_and_back(replicas):
    there = [(r, (r + 1) % replicas) for r in range(replicas)]
    return [there, [(receiver, sender) for sender, receiver in there]]


NUMBERS = {
    "local_sgd": simulated(
        lambda: sync.LocalSGD(4), lambda p: Training(p, of_steps(4), simulation.take_mean)
    ),
    "local_sgd_of_momenta": simulated(
        lambda: sync.LocalSGD(4, average=("weights", "optimizer")),
        lambda p: Training(p, of_steps(4), simulation.take_mean_of_optimizers),
    ),
    "growing": simulated(
        lambda: sync.LocalSGD(sync.Period(1, 8, 3)),
        lambda p: Training(p, of_steps(1, 2, 4, 8), simulation.take_mean),
    ),
    "shrinking": simulated(
        lambda: sync.LocalSGD(sync.Period(8, 2, 2)),
        lambda p: Training(p, of_steps(8, 4, 2), simulation.take_mean),
    ),
    "diloco": simulated(
        lambda: sync.DiLoCo(4),
        lambda p: Training(p, of_steps(4), simulation.outer_step(Momentum(0.7, 0.9, True))),
    ),
    "diloco_with_another_outer": simulated(
        lambda: sync.DiLoCo(5, outer=lambda: keras.optimizers.SGD(0.5, momentum=0.5)),
        lambda p: Training(p, of_steps(5), simulation.outer_step(Momentum(0.5, 0.5))),
    ),
    "fragments": simulated(
        lambda: sync.DiLoCo(4, fragments=2),
        lambda p: Stream([[0], [1]], 0, 0.0).training(p, 2),
    ),
    "stream": simulated(  # whose end comes while something is in flight
        lambda: sync.DiLoCo(8, fragments=2, delay=3, blend=0.25),
        lambda p: Stream([[0], [1]], 3, 0.25).training(p, 4),
    ),
    "stream_of_one_fragment": simulated(
        lambda: sync.DiLoCo(6, delay=2), lambda p: Stream([[0, 1]], 2, 0.5).training(p, 6)
    ),
    "elastic": simulated(
        lambda: sync.ElasticAveraging(3, alpha=0.2),
        lambda p: Training(p, of_steps(3), simulation.elastic(0.2), simulation.take_centre),
    ),
    "gossip": simulated(lambda: sync.Gossip(), lambda p: mixing(p, 1, powers_of_two(p))),
    "gossip_on_bf16": simulated(
        lambda: sync.Gossip(2, wire="bf16"),
        lambda p: mixing(p, 2, powers_of_two(p), rounded=as_bf16),
    ),
    "gossip_in_a_ring": simulated(
        lambda: sync.Gossip(4, "ring"), lambda p: mixing(p, 4, [neighbours(p)])
    ),
    "gossip_in_pairs": simulated(
        lambda: sync.Gossip(2, "random", seed=7), lambda p: mixing(p, 2, random_graph(p, 7))
    ),
    "gossip_by_an_own_graph": simulated(
        lambda: sync.Gossip(2, there_and_back), lambda p: mixing(p, 2, there_and_back(p))
    ),
}


def post_local(make, folder):
    """Synchronous steps first, momenta included; then rounds of three."""
    strategy = make(sync.LocalSGD(3, start=5))
    model = regression(strategy)
    fit(model, 2)
    training = Training(replicas(strategy), of_steps(3), simulation.take_mean)
    x, y = simulation.problem()
    for step in range(5):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        gradient = simulation.gradient(training.weights[0], x[rows], y[rows])
        training.weights = [
            inner.apply(own, gradient)
            for inner, own in zip(training.inner, training.weights, strict=True)
        ]
    for step in range(5, 18):
        rows = slice(step % 9 * BATCH, (step % 9 + 1) * BATCH)
        training.step(x[rows], y[rows])
        if step in (7, 10, 13, 16, 17):
            simulation.take_mean(training)
    same(model, training.mean())


def one_step_rounds(make, folder):
    """Rounds of one step are synchronous training, for SGD."""

    def trained(rule):
        model = regression(make(rule), lambda: keras.optimizers.SGD(RATE))
        fit(model, 2)
        return model.get_weights()

    expected = trained(sync.EveryStep())
    for rule in (sync.LocalSGD(1), sync.DiLoCo(1, outer=keras.optimizers.SGD(1.0))):
        for found, number in zip(trained(rule), expected, strict=True):
            np.testing.assert_allclose(found, number, err_msg=repr(rule), **EXACT)


# ---- what is sent


class EachStep(keras.callbacks.Callback):
    """Callback that records by how much the numbers of ``_now`` have grown in each step."""

    def on_train_begin(self, logs=None):
        self.steps = []

    def on_train_batch_begin(self, batch, logs=None):
        self._before = self._now()

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(tuple(now - then for now, then in zip(self._now(), self._before)))


def sent_by(strategy):
    """Return how many collectives have run, and how many bytes they have sent."""
    extended = strategy.extended
    groups = [group for group in (extended.group, extended.hosts) if group is not None]
    totals = [
        total
        for group in groups
        for communicator in group.communicators
        for total in communicator.totals().values()
    ]
    return sum(t.calls for t in totals), sum(t.sent for t in totals)


class Traffic(EachStep):
    """Callback that counts the collectives of each step, and their bytes."""

    def _now(self):
        return sent_by(self.model.distribute_strategy)


def with_much_to_say(strategy, **how):
    """Batch normalization, dropout, masks, metrics, sample weights: all of which talk in steps."""
    with strategy.scope():
        model = keras.Sequential([
            keras.Input([FEATURES]),
            layers.Masking(),
            layers.Dense(16, activation="relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(OUTPUTS),
        ])  # fmt: skip
        model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"], **how)
    return model


SILENT = {
    "": (sync.DiLoCo(4, wire="int8"), sync.Gossip(4, "ring")),
    " of means": (sync.LocalSGD(4), sync.ElasticAveraging(4, 0.2)),
}


def silence(rules, make, folder):
    """Between the ends of rounds nothing is sent, whatever layers, losses and metrics do."""
    for rule in rules:
        model, traffic = with_much_to_say(make(rule)), Traffic()
        weights = np.ones(72, "float32")
        fit(model, 2, callbacks=[traffic], sample_weight=weights)
        for step, (calls, sent) in enumerate(traffic.steps, 1):
            assert (calls > 0) == (sent > 0) == (step % 4 == 0), (rule, step, calls, sent)
    model, traffic = with_much_to_say(make(sync.EveryStep())), Traffic()
    fit(model, callbacks=[traffic])
    assert all(calls > 0 for calls, _ in traffic.steps)  # the check can fail


# ---- between rounds


def copies(model):
    """Each replica's weights, in this process."""
    variables = [v.value for v in model.trainable_variables]
    return [[v.values[r].numpy() for v in variables] for r in range(len(variables[0].values))]


class Middle(keras.callbacks.Callback):
    """Looks at a model in the middle of a round."""

    def __init__(self, look, step):
        super().__init__()
        self._look, self._step, self.seen = look, step, None

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self._step:
            self.seen = self._look(self.model)


OUTSIDE = {
    "": {
        sync.ElasticAveraging(4, 0.2): None,
        sync.Gossip(4): lambda p: simulation.mix(powers_of_two(p)),
    },
    " by other rules": {
        sync.LocalSGD(4): lambda p: simulation.take_mean,
        sync.Gossip(4, there_and_back): lambda p: simulation.mix(there_and_back(p)),
    },
}


def outside_of_replicas(rules, make, folder):
    """Users read, evaluate and predict with the mean or the centre in the middle of a round."""
    x, y = simulation.problem()

    def look(model):
        before = copies(model)
        found = model.get_weights()
        loss, guess = model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)
        shown = model.get_weights()
        assert put_aside(model) > 0
        return before, found, loss, guess, shown

    p = replicas(make(sync.LocalSGD(4)))
    for rule, make_end in rules.items():
        end = make_end and make_end(p)
        strategy = make(rule)
        model = regression(strategy)
        middle = Middle(look, 6)
        fit(model, callbacks=[middle])
        training = Training(p, of_steps(4), end or simulation.elastic(0.2))
        on(strategy, training)
        for step in range(6):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            training.step(x[rows], y[rows])
            if step == 3:
                training.end(training)
        expected = training.mean() if end else training.centre
        before, found, loss, guess, shown = middle.seen
        first = strategy.extended.first_rank
        for own, simulated in zip(before, training.weights[first:]):
            for a, b in zip(own, simulated, strict=True):
                np.testing.assert_allclose(a, b, **EXACT)
        for weights in (found, shown):
            for a, b in zip(weights, expected, strict=True):
                np.testing.assert_allclose(a, b, **EXACT)
        outputs = x @ expected[0] + expected[1]
        np.testing.assert_allclose(guess, outputs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(loss, np.mean((outputs - y) ** 2), rtol=1e-5)
        assert put_aside(model) == 0  # at the end of fit
        untouched = regression(strategy)
        fit(untouched)
        same(model, untouched.get_weights(), atol=0)  # looking has changed nothing


def put_aside(model):
    """Return how many numbers of this process's replicas an evaluation has put aside."""
    flags = model.distribute_strategy.rounds.of(model).state.flags.values()
    return sum(cell.numpy().size for one in flags for cell in one.aside)


ASSIGNED = {
    "": (sync.DiLoCo(100), sync.Gossip(2, there_and_back)),
    " by other rules": (sync.LocalSGD(100), sync.ElasticAveraging(100, 0.2)),
}


def assigned_in_the_middle(rules, make, folder):
    """Weights that a callback sets while an evaluation's are shown are those that train on."""

    def look(model):
        model.evaluate(*simulation.problem(), verbose=0)
        model.set_weights([w * 0 + 1 for w in model.get_weights()])

    for rule in rules:
        model = regression(make(rule), lambda: keras.optimizers.SGD(0.0))
        fit(model, callbacks=[Middle(look, 3)])
        same(model, [np.ones_like(w) for w in simulation.beginning()], atol=0, err_msg=repr(rule))


# ---- programs


def programs(make, folder):
    """Keras's defaults and what strangers do: all replicas end with the same weights."""
    programs_by(sync.DiLoCo(3), make)


def programs_by(rule, make):
    how = {
        "eager": ({"run_eagerly": True}, {}),
        "several steps": ({"steps_per_execution": 2}, {}),
        "last batch of one row": ({}, {"samples": 65}),
        "validation": ({"metrics": ["mae"]}, {"validation_split": 0.2}),
    }
    for name, (compiled, fitted) in how.items():
        strategy = make(rule)
        model = regression(strategy, "adam", **compiled)
        history = fit(model, 2, **fitted).history
        assert np.isfinite(history["loss"]).all(), name
        fit(model, 1, **fitted)
        agree(model)


def stream_of_programs(make, folder):
    """Train programs with updates that travel behind steps, over an edge of two epochs, too."""
    programs_by(sync.DiLoCo(8, fragments=2, delay=3, wire="bf16"), make)


def agree(model):
    """All replicas of this process have the same bits, and so have all workers."""
    first, *others = copies(model)
    for other in others:
        assert [w.tobytes() for w in other] == [w.tobytes() for w in first]
    strategy = model.distribute_strategy
    digest = tf.constant([float(np.sum([np.sum(w.astype("float64")) for w in first]))], tf.float64)
    every = strategy.gather(strategy.run(lambda: tf.identity(digest)), 0).numpy()
    assert len(set(every.tolist())) == 1, every


def last_batch_of_one_row(make, folder):
    """A replica without rows changes nothing, and is in step with the others."""
    strategy = make(sync.LocalSGD(4))
    model = regression(strategy)
    fit(model, 2, samples=65)
    same(model, Training(replicas(strategy), of_steps(4), simulation.take_mean).run(2, samples=65))


def images_of_any_size(make, folder):
    """A replica without rows computes on a row that it had before, for none has its shape."""
    strategy = make(sync.LocalSGD(2))
    with strategy.scope():
        model = keras.Sequential([
            keras.Input([None, None, 1]), layers.Conv2D(4, 5), layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(), layers.Dense(2),
        ])  # fmt: skip
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).standard_normal([9, 8, 8, 1]).astype("float32")

    def batches():
        for first in range(0, 9, 4):
            yield x[first : first + 4], x[first : first + 4, 0, :2, 0]

    shapes = (tf.TensorSpec([None, None, None, 1]), tf.TensorSpec([None, 2]))
    data = tf.data.Dataset.from_generator(batches, output_signature=shapes)
    model.fit(data, epochs=2, verbose=0)
    agree(model)


def mixed_precision(make, folder):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = with_much_to_say(make(sync.DiLoCo(3, wire="bf16")))
        fit(model, 2)
        agree(model)
    finally:
        keras.config.set_dtype_policy("float32")


def other_types(make, folder):
    """Weights of more and of fewer bits than the outer weights and the centre are kept in."""
    bits = {"float64": 1e-15, "bfloat16": 2**-8}
    rules = (sync.DiLoCo(4), sync.ElasticAveraging(4, 0.2))
    for rule, dtype in itertools.product(rules, bits):
        with (strategy := make(rule)).scope():
            head = layers.Dense(OUTPUTS, dtype=dtype)
            model = keras.Sequential([keras.Input([FEATURES], dtype=dtype), head])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        before = model.get_weights()
        fit(model)
        for found, number in zip(model.get_weights(), before, strict=True):
            close = {"rtol": bits[dtype], "atol": bits[dtype]}
            np.testing.assert_allclose(found.astype("f8"), number.astype("f8"), **close)
        model.optimizer.learning_rate = RATE
        losses = fit(model, 2).history["loss"]
        assert losses[1] < losses[0], (dtype, losses)
        agree(model)
        assert replicas(strategy) > 1


class Centred(layers.Layer):
    """Counts what its inputs are on average, and says how replicas are to agree on that."""

    def __init__(self, aggregation):
        super().__init__()
        self.centre = self.add_weight(shape=(), trainable=False, aggregation=aggregation)

    def call(self, inputs):
        self.centre.assign(keras.ops.mean(inputs))
        return inputs


def aggregated(make, folder):
    """A mean that a layer asks for is made at the ends of rounds; a sum is refused."""
    strategy = make(sync.LocalSGD(9))
    with strategy.scope():
        layer = Centred("mean")
        model = keras.Sequential([keras.Input([FEATURES]), layer, layers.Dense(OUTPUTS)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    traffic = Traffic()
    fit(model, callbacks=[traffic])
    assert [calls > 0 for calls, _ in traffic.steps] == 8 * [False] + [True]
    last = simulation.problem(72)[0][-BATCH:]
    for own in layer.centre.value.values:
        np.testing.assert_allclose(own.numpy(), last.mean(), rtol=0, atol=1e-6)
    with strategy.scope(), pytest.raises(ValueError, match="sums each assignment over replicas"):
        Centred("sum")


def never_compiled(make, folder):
    """A model that nobody trains predicts."""
    with make(sync.LocalSGD(4)).scope():
        model = keras.Sequential([keras.Input([FEATURES]), layers.Dense(OUTPUTS)])
    model.set_weights(simulation.beginning())
    x, _ = simulation.problem()
    kernel, bias = simulation.beginning()
    np.testing.assert_allclose(model.predict(x, verbose=0), x @ kernel + bias, rtol=0, atol=1e-5)


def optimizers(make, folder):
    """Ours and Keras's, with clipping, averages of weights and accumulation."""
    import tfscale

    every = {
        "LAMB": lambda: tfscale.optimizers.LAMB(0.01),
        "LARS": lambda: tfscale.optimizers.LARS(1.0),
        "AdaHessian": lambda: tfscale.optimizers.AdaHessian(0.05),
        "AdamW": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=1.0, use_ema=True),
        "accumulating": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    }
    for name, optimizer in every.items():
        model = regression(make(sync.LocalSGD(3)), optimizer)
        losses = fit(model, 3).history["loss"]
        assert losses[-1] < losses[0], (name, losses)
        agree(model)


@dataclasses.dataclass(frozen=True)
class OwnGradients(Method):
    """A user's method, with a mistake: it returns what it should have sent."""

    def sums(self, load):
        for number, gradient in enumerate(load.gradients):
            load.all_reduce(gradient, what=str(number))
        return list(load.gradients)


class Alone(sync.Rule):
    """A user's rule, with a mistake: nothing makes replicas agree."""

    every, agrees = 4, False

    def end(self, round):
        round.mean([weight.read_value() for weight in round.weights])


class Together(Alone):
    """A user's rule that agrees at the end of ``fit`` only."""

    def settle(self, round):
        means = round.mean([weight.read_value() for weight in round.weights])
        for weight, mean in zip(round.weights, means, strict=True):
            weight.assign(mean)


def told_if_replicas_end_apart(make, folder):
    """A user's own rule or method that leaves replicas different is an error, on all workers."""
    fit(regression(make(Together())))
    methods = {"head": OwnGradients()}
    mistakes = [
        (make(Alone()), "Alone.every=4.*settle.round."),
        (make(sync.EveryStep(), method=methods), "OwnGradients.*sums.load."),
        (make(sync.EveryStep(), method={"head": Staged("fp32", OwnGradients(), 1)}), "OwnGrad"),
    ]
    for strategy, advice in mistakes:
        where = r"end of fit, replicas \[1.*\] have other values of .*'.*head/kernel' .and of 1"
        with pytest.raises(RuntimeError, match=f"{where} .*{advice}"):
            fit(regression(strategy))


def refused(make, folder):
    """An unsupported program raises an error that says what to do."""
    strategy = make(sync.DiLoCo(4))
    scaling = keras.optimizers.LossScaleOptimizer
    model = regression(strategy, lambda: scaling(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="LossScaleOptimizer.*mixed_bfloat16"):
        fit(model)
    model = regression(strategy)
    swap = keras.callbacks.SwapEMAWeights()
    with pytest.raises(ValueError, match="SwapEMAWeights does not work with sync="):
        fit(model, callbacks=[swap])
    if strategy.extended._num_workers > 1:
        with pytest.raises(ValueError, match="TerminateOnNaN does not work with sync="):
            fit(model, callbacks=[keras.callbacks.TerminateOnNaN()])
        for rule, words in (
            (sync.LocalSGD(sync.Period(8, 2, 2)), "rounds that get shorter"),
            (sync.LocalSGD(4, start=6), "begins with synchronous steps"),
        ):
            other = make(rule)
            with pytest.raises(ValueError, match=words):
                regression(other).fit(generated(other, [3, 6]), epochs=2, verbose=0)
    few = regression(make(sync.DiLoCo(6, fragments=3)))
    with pytest.raises(ValueError, match="fragments=3, but the model has 2 weights.*Take 2 or"):
        fit(few)  # which alone tells how many weights there are
    fit(regression(make(sync.DiLoCo(6, fragments=2))))
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        weight = keras.Variable(1.0)
    with pytest.raises(ValueError, match=re.escape("passed to strategy.run")):
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))


def generated(strategy, steps):
    """Data of so many batches on each worker, which nobody knows before."""
    x, y = simulation.problem()

    def batches():
        for first in range(0, BATCH * steps[strategy.extended._id_in_cluster], BATCH):
            yield x[first : first + BATCH], y[first : first + BATCH]

    specs = (tf.TensorSpec([None, FEATURES]), tf.TensorSpec([None, OUTPUTS]))
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


def workers_with_other_numbers_of_batches(make, folder):
    """Generators that nobody knows the length of: who has no batch left waits for the others."""
    strategy = make(sync.LocalSGD(4))
    workers = strategy.extended._num_workers
    x, y = simulation.problem()
    steps = [5 + 3 * worker for worker in range(workers)]
    model = regression(strategy)
    model.fit(generated(strategy, steps), epochs=2, verbose=0)

    training = Training(replicas(strategy), of_steps(4), simulation.take_mean)
    each = replicas(strategy) // workers
    size = BATCH // replicas(strategy)  # each worker cuts its batches for all replicas

    def own_steps(replica):
        worker, place = divmod(replica, each)
        rows = range(0, BATCH * steps[worker], size * each)
        return [slice(first + place * size, first + (place + 1) * size) for first in rows]

    # With one worker rounds go on over the end of an epoch, as always.
    epochs = [2] if workers == 1 else [1, 1]
    for times in epochs:
        left = [times * own_steps(replica) for replica in range(replicas(strategy))]
        while any(left):
            for replica, rows in enumerate(left):
                for one in rows[:4]:
                    g = simulation.gradient(training.weights[replica], x[one], y[one])
                    inner = training.inner[replica]
                    training.weights[replica] = inner.apply(training.weights[replica], g)
            left = [rows[4:] for rows in left]
            simulation.take_mean(training)
    same(model, training.mean())
    agree(model)


class Reads(keras.callbacks.Callback):
    """Reads data of its own at the end of each epoch."""

    def __init__(self, data):
        super().__init__()
        self._data, self.batches = data, []

    def on_epoch_end(self, epoch, logs=None):
        distributed = self.model.distribute_strategy.experimental_distribute_dataset(self._data)
        self.batches.append(sum(1 for _ in zip(distributed, range(9))))


def read_by_a_callback(make, folder):
    """The callback's data end, whatever rounds wait for."""
    model = regression(make(sync.LocalSGD(4)))
    x, _ = simulation.problem()
    data = tf.data.Dataset.from_tensor_slices(x[: 3 * BATCH]).batch(BATCH)
    reads = Reads(data.filter(lambda rows: True))
    fit(model, 2, callbacks=[reads])
    assert len(set(reads.batches)) == 1 and 0 < reads.batches[0] <= 4, reads.batches


def stream_of_workers_with_other_numbers_of_batches(make, folder):
    """A worker without batches still sends and takes with the others, at steps of its own."""
    strategy = make(sync.DiLoCo(8, fragments=2, delay=3))
    steps = [5 + 4 * worker for worker in range(strategy.extended._num_workers)]
    model = regression(strategy)
    first, second = model.fit(generated(strategy, steps), epochs=2, verbose=0).history["loss"]
    assert second < first
    agree(model)


def stream_on_a_wire(make, folder):
    """Residuals keep what rounding loses, and all replicas end with the same bits."""
    wire = WirePolicy("int8", small=0)
    strategy = make(sync.DiLoCo(6, fragments=2, delay=2, wire=wire))
    model = regression(strategy)
    fit(model, 2)
    agree(model)
    residuals = model.optimizer._tfscale_memory.named(strategy.rounds.reducer.keeps_as + RESIDUAL)
    assert [place for place, lost in residuals.items() if np.any(lost.numpy())] == ["0"]
    exact = streaming(strategy, Stream([[0], [1]], 2, 0.5), 3)[1].run(2)
    # Six sums, each of which an outer step and its momentum make at most 7 times as large, of
    # changes that are smaller than 1, by a wire that rounds twice to 254 levels.
    same(model, exact, atol=6 * 7 * 2 / 254)
    assert any(np.any(found != number) for found, number in zip(model.get_weights(), exact))


def streaming(strategy, stream=None, steps=4):
    """Simulate a rule in numpy, for replicas or for groups."""
    stream, agreeing = stream or Stream([[0], [1]], 3, 0.25), strategy.rounds.teams.number
    training = stream.training(agreeing, steps, devices=replicas(strategy) // agreeing)
    return stream, on(strategy, training)


STREAM = sync.DiLoCo(8, fragments=2, delay=3, blend=0.25)


def assigned_in_flight(make, folder):
    """Weights that are assigned stay so: a change from other weights does not come in."""
    strategy = make(STREAM)
    model = regression(strategy)
    fit(model, callbacks=[Middle(lambda m: m.set_weights([w * 0 + 1 for w in copies(m)[0]]), 5)])
    stream, training = streaming(strategy)
    position = stream.steps(training, range(5))
    ones = [np.ones_like(w) for w in training.began]
    training.weights, training.began = [list(ones) for _ in training.weights], list(ones)
    stream.flight = None
    stream.finish(training, stream.steps(training, range(5, 9), position))
    same(model, training.mean())


def assigned_at_the_end(make, folder):
    """All agree after ``fit``, also if what travels is given up after its last round has ended."""
    strategy = make(sync.DiLoCo(4, delay=2))
    model = regression(strategy)
    fit(model, 1, samples=64, callbacks=[Middle(lambda m: m.weights[1].assign([1, 1, 1]), 8)])
    for own in zip(*copies(model)):
        np.testing.assert_array_equal(own[0], own[-1])


class WithShare(layers.Dense):
    """Has a number that is not trained, such as one that a callback lowers."""

    def build(self, shape):
        super().build(shape)
        self.share = self.add_weight(name="share", trainable=False)


def assigned_what_is_not_trained(make, folder):
    """The pending update comes in all the same."""
    strategy = make(STREAM)
    with strategy.scope():
        model = keras.Sequential([keras.Input([FEATURES]), WithShare(OUTPUTS)])
        model.compile(keras.optimizers.SGD(RATE, momentum=0.9), "mse")
    model.set_weights([*simulation.beginning(), np.float32(1)])
    fit(model, callbacks=[Middle(lambda m: m.layers[-1].share.assign(0.5), 5)])
    stream, training = streaming(strategy)
    stream.finish(training, stream.steps(training, range(9)))
    same(model, [*training.mean(), 0.5])


MOMENTS = {"": 5, " at the end of a round": 8}


def interrupted_in_flight(moment, make, folder):
    """Files hold the state before the update was sent; in the same model it comes in later."""
    file = folder / "own.weights.h5"
    strategy = make(STREAM)
    model = regression(strategy)
    saves = Middle(lambda model: model.save_weights(file), moment)
    with pytest.raises(InterruptedError):
        fit(model, callbacks=[saves, Stop(moment)])
    fit(model)
    stream, training = streaming(strategy)
    position = stream.steps(training, range(moment))
    stream.finish(training, stream.steps(training, range(9), position))
    same(model, training.mean())

    loaded = regression(make(STREAM))
    with loaded.distribute_strategy.scope():  # else Keras loads only the weights
        loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(file)
    fit(loaded)
    stream, training = streaming(strategy)
    position = stream.steps(training, range(moment))
    training.weights = [training.mean() for _ in training.weights]
    means = [np.mean(parts, 0) for parts in zip(*(one.kept for one in training.inner))]
    for one in training.inner:
        one.kept = [m.copy() for m in means]
    stream.flight = None
    stream.finish(training, stream.steps(training, range(9), position))
    same(loaded, training.mean(), atol=3e-6)


def stream_is_explained(make, folder):
    """The table says how many bytes are sent, and how many of them travel behind steps."""
    strategy = make(STREAM)
    model = regression(strategy)
    log = folder / "telemetry.jsonl"
    fit(model, callbacks=[Telemetry(log)])
    said = str(strategy.explain())
    assert "changes of fragment 1 0: head/bias" in said, said
    said = " ".join(said.split())
    assert "2 in turn sum 84 bytes" in said and "% went by behind steps" in said, said
    figures = strategy.rounds.figures()
    assert figures["hidden"] <= 1 and figures["drift"] > 0, figures
    if log.exists():  # worker 0 writes it
        told = [json.loads(line) for line in log.read_text().splitlines()]
        steps = [line for line in told if line["kind"] == "step"]
        assert sum(line["sent"] for line in steps) > 0
        assert not any(line["exposed"] for line in steps), steps
        epochs = [line for line in told if line["kind"] == "epoch"]
        assert epochs and all(line["rounds"] > 0 and line["drift"] > 0 for line in epochs), epochs


# ---- files


class Stop(keras.callbacks.Callback):
    """Ends a training with an error after so many steps."""

    def __init__(self, step):
        super().__init__()
        self._left = step

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if self._left == 0:
            raise InterruptedError


def taken_up_again(make, folder):
    """Saved in the middle of a round, read into a new model: it goes on from the average."""

    def make_end():
        return simulation.outer_step(Momentum(0.7, 0.9, True))

    _taken_up_again(make, folder, sync.DiLoCo(4), make_end, Training.mean)


def centre_taken_up_again(make, folder):
    """Take up an interrupted training from the centre."""
    rule = sync.ElasticAveraging(4, 0.2)
    _taken_up_again(
        make, folder, rule, lambda: simulation.elastic(0.2), lambda training: training.centre
    )


def _taken_up_again(make, folder, rule, make_end, read):
    x, y = simulation.problem()

    def interrupted(name, save):
        model = regression(make(rule))
        with pytest.raises(InterruptedError):
            fit(model, callbacks=[Stop(6)])
        save(model)
        return name

    def expected():
        strategy = make(rule)
        training = on(strategy, Training(replicas(strategy), of_steps(4), make_end()))
        for step in range(6):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            training.step(x[rows], y[rows])
            if step == 3:
                training.end(training)
        training.weights = [[w.copy() for w in read(training)] for _ in training.weights]
        means = [np.mean(parts, 0) for parts in zip(*(one.kept for one in training.inner))]
        for one in training.inner:
            one.kept = [m.copy() for m in means]
        for step in range(9):  # an epoch, from the sixth step of all on
            rows = slice(step * BATCH, (step + 1) * BATCH)
            training.step(x[rows], y[rows])
            if step in (1, 5, 8):
                training.end(training)
        return read(training)

    def from_keras(path):
        strategy = make(rule)
        with strategy.scope():
            return keras.models.load_model(path)

    def from_checkpoint(path):
        model = regression(make(rule))
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
        return model

    def checkpoint(model):
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "point"))

    file = str(folder / "model.keras")
    for name, save, load in (
        (file, lambda model: model.save(file), from_keras),
        (str(folder / "point"), checkpoint, from_checkpoint),
    ):
        model = load(interrupted(name, save))
        fit(model)
        same(model, expected(), atol=3e-6)
        agree(model)
    alone = keras.models.load_model(file)
    assert alone.count_params() == sum(w.size for w in simulation.beginning())


def save_all(model, folder):
    """Save the model in each kind of file that a training goes on from."""
    model.save(folder / "model.keras")
    model.save_weights(folder / "own.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "point"))


def saved_by_one_worker(make, folder):
    """After ``fit`` has returned, and after a file has been read, saving sends nothing."""

    def save(model):
        before = sent_by(model.distribute_strategy)
        save_all(model, folder)
        assert sent_by(model.distribute_strategy) == before
        return model.get_weights()

    x, y = simulation.problem()
    middle, own = folder / "middle.weights.h5", folder / "own.weights.h5"
    rules = (sync.DiLoCo(4), STREAM, sync.ElasticAveraging(4, 0.2), sync.Gossip(2, there_and_back))
    for rule in rules:
        model = regression(make(rule))
        fit(model, callbacks=[Middle(lambda model: model.save_weights(middle), 6)])
        expected = save(model)
        with make(rule).scope():
            loaded = keras.models.load_model(folder / "model.keras")
        loaded.evaluate(x, y, verbose=0)
        for one in (model, loaded):
            same(one, expected, atol=0)
        for one in (loaded, model):
            np.testing.assert_equal(save(one), expected)
            one.load_weights(middle)
            read = save(one)
            one.load_weights(own)
            np.testing.assert_equal(one.get_weights(), read)
            fit(one)
            agree(one)
        same(loaded, model.get_weights())


def assigned_after_loading(make, folder):
    """A file of the middle of a round is read, and then there are other weights, of which nothing
    of what the file held is left.
    """
    file, plain = str(folder / "model.keras"), folder / "plain.weights.h5"
    ones = [np.ones_like(w) for w in simulation.beginning()]
    (other := regression(make(sync.EveryStep()))).set_weights(ones)
    other.save_weights(plain)
    centre, stream = sync.ElasticAveraging(4, 0.2), sync.DiLoCo(8, fragments=2, delay=3)
    for rule, reads in ((centre, False), (centre, True), (stream, True)):
        fit(regression(make(rule)), callbacks=[Middle(lambda model: model.save(file), 6)])
        with make(rule).scope():
            model = keras.models.load_model(file)
        if reads:
            model.load_weights(plain)
        else:
            model.set_weights(ones)
        model.optimizer.learning_rate = 0.0
        for variable in model.optimizer.variables[2:]:
            variable.assign(variable * 0)  # momenta
        middle = Middle(lambda model: model.get_weights(), 1)
        fit(model, callbacks=[middle])
        for found in (middle.seen, model.get_weights()):
            for one, expected in zip(found, ones, strict=True):
                np.testing.assert_array_equal(one, expected, err_msg=f"{rule!r}, {reads}")


def read_as_a_saved_model(make, folder):
    """A saved model has no use for the state of a rule."""
    x, _ = simulation.problem()
    model = regression(make(sync.ElasticAveraging(4, 0.2)))
    fit(model)
    tf.saved_model.save(model, str(folder / "saved"))
    serve = tf.saved_model.load(str(folder / "saved")).signatures["serving_default"]
    (name,) = serve.structured_input_signature[1]
    (found,) = serve(**{name: tf.constant(x)}).values()
    np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=1e-5)


def centre_in_shards(make, folder):
    """Each replica holds a part of the centre, and sends as much as for the mean of all weights."""
    strategy = make(sync.ElasticAveraging(4, 0.2))
    model, traffic = regression(strategy), Traffic()
    fit(model, callbacks=[traffic])
    ranks = replicas(strategy)
    held = [-(-w.size // ranks) for w in model.get_weights()]
    shards = model.optimizer._tfscale_memory.named("centre")
    assert [v.shape[0] for one in shards.values() for v in one.values[:1]] == held
    sent = 2 * (ranks - 1) * sum(held) * 4
    several = strategy.extended._num_workers > 1  # whose numbers of batches are compared
    totals = strategy.extended.group.communicators[0].totals()
    of_centre = [total.sent for name, total in totals.items() if "centre" in name.label]
    assert sum(of_centre) == 3 * sent + sent // 2  # three rounds, and what all take in the end
    if not several:
        every = sum(sent for _, sent in traffic.steps)
        assert every == 2 * sent * len(strategy.extended.group.communicators)
    rows = strategy.explain()
    assert {"shards of the centre", "sum into the centre"} == {row.bucket.label for row in rows}
    assert sum(row.sent for row in rows) == sent


def gossip_taken_up_again(make, folder):
    """Training goes on from the mean, with the mixture whose turn it is."""

    def rule():
        return sync.Gossip(2, there_and_back)

    model, file = regression(make(rule())), str(folder / "model.keras")
    with pytest.raises(InterruptedError):
        fit(model, callbacks=[Stop(7)])
    model.save(file)
    with (strategy := make(rule())).scope():
        model = keras.models.load_model(file)
    fit(model)

    p = replicas(strategy)
    training = on(strategy, Training(p, of_steps(2), simulation.mix(there_and_back(p))))
    x, y = simulation.problem()
    for step in range(16):
        if step == 7:
            simulation.take_mean(training)
            means = [np.mean(parts, 0) for parts in zip(*(one.kept for one in training.inner))]
            for one in training.inner:
                one.kept = [m.copy() for m in means]
        rows = slice((step if step < 7 else step - 7) * BATCH, None)
        training.step(x[rows][:BATCH], y[rows][:BATCH])
        if step % 2:
            training.end(training)
    simulation.take_mean(training)
    same(model, training.mean(), atol=3e-6)


GOSSIP_OF_STRANGERS = {
    "": (
        (sync.Gossip(3, "random", seed=2), {"run_eagerly": True}, {}),
        (sync.Gossip(3, there_and_back), {"steps_per_execution": 2}, {"validation_split": 0.2}),
    ),
    " in each step": ((sync.Gossip(), {}, {"validation_split": 0.2}),),
}


def gossip_of_strangers(cases, make, folder):
    """Batch normalization, a last batch of one row, validation, eagerly, and a second fit."""
    for rule, how, fitted in cases:
        model = with_much_to_say(strategy := make(rule), **how)
        losses = fit(model, 2, samples=65, **fitted).history["loss"]
        assert np.isfinite(losses).all(), (rule, losses)
        fit(model, samples=65)
        agree(model)
        said = repr(strategy.explain())
        assert "weights to mix, by gossip(" in said and "to sum them by ring" in said, said
        assert strategy.rounds.figures()["rounds"] > 0


def loaded_from_a_training_without_rounds(make, folder):
    """State that a file does not hold begins anew: the round, and the outer optimizer."""
    plain, file = regression(make(sync.EveryStep())), folder / "plain.weights.h5"
    fit(plain)
    plain.save_weights(file)

    def trained(before):
        model = regression(make(sync.DiLoCo(4)))
        with model.distribute_strategy.scope():  # else Keras loads only the weights
            model.optimizer.build(model.trainable_variables)
        for _ in range(before):
            fit(model)
        model.load_weights(file)
        fit(model)
        return model

    same(trained(before=1), trained(before=0).get_weights())


INTERRUPTED = {"": sync.ElasticAveraging(4, 0.2), " by DiLoCo": sync.DiLoCo(4)}


def loaded_after_an_interruption(rule, make, folder):
    """Read in the middle of a round, a file does in the same model what it does in a new one."""
    plain, own = folder / "plain.weights.h5", folder / "own.weights.h5"
    source = regression(make(sync.EveryStep()))
    fit(source)
    source.save_weights(plain)
    model = regression(make(rule))
    saves = Middle(lambda model: model.save_weights(own), 4)
    with pytest.raises(InterruptedError):
        fit(model, callbacks=[saves, Stop(6)])
    for file in (own, plain):
        fresh = regression(make(rule))
        with fresh.distribute_strategy.scope():  # else Keras loads only the weights
            fresh.optimizer.build(fresh.trainable_variables)
        for one in (model, fresh):
            one.load_weights(file)
        for one in (model, fresh):
            with pytest.raises(InterruptedError):
                fit(one, callbacks=[Stop(6)])
        same(model, fresh.get_weights(), err_msg=f"{rule}, {file.name}")


def compiled_after_an_interruption(make, folder):
    """An evaluation sees the mean, and the next fit ends the round that was under way."""
    model = regression(make(sync.DiLoCo(4)))
    with pytest.raises(InterruptedError):
        fit(model, callbacks=[Stop(6)])
    kernel, bias = model.get_weights()
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.SGD(RATE), "mse")
    x, y = simulation.problem()
    expected = np.mean((x @ kernel + bias - y) ** 2)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), expected, rtol=1e-5)
    middle = Middle(lambda model: (model.get_weights(), model.evaluate(x, y, verbose=0)), 2)
    fit(model, callbacks=[middle])
    (kernel, bias), seen = middle.seen
    np.testing.assert_allclose(seen, np.mean((x @ kernel + bias - y) ** 2), rtol=1e-5)
    agree(model)


def callbacks(make, folder):
    """Keras's callbacks, with a validation in the middle of each round."""
    strategy = make(sync.LocalSGD(4))
    model = regression(strategy, "adam")
    held = simulation.problem(seed=5)
    saver = keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True)
    stop = keras.callbacks.EarlyStopping(patience=100, restore_best_weights=True)
    backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=5)
    history = fit(model, 6, validation_data=held, callbacks=[saver, stop, backup]).history
    best = min(history["val_loss"])
    np.testing.assert_allclose(model.evaluate(*held, verbose=0), best, rtol=1e-5)
    agree(model)
    if strategy.extended.first_rank == 0:
        saved = keras.models.load_model(folder / "best.keras")
        np.testing.assert_allclose(saved.evaluate(*held, verbose=0), best, rtol=1e-5)


def fit_masked_words(strategy, rows):
    """Train on masked words; a replica without rows makes up a masked row, which gives NaN."""
    with strategy.scope():
        model = keras.Sequential([
            keras.Input([4], dtype="int32"),
            layers.Embedding(9, 3, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ])  # fmt: skip
        model.compile("sgd", "mse")
    words = 1 + np.arange(4 * rows, dtype="int32").reshape(rows, 4) % 8
    model.fit(words, np.ones([rows, 1], "float32"), batch_size=rows, epochs=4, verbose=0)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    agree(model)


def a_replica_that_never_had_a_row(make, folder):
    """Train in steps that are synchronous, and then in rounds."""
    fit_masked_words(make(sync.LocalSGD(2, start=2)), rows=1)


class WithAnIdleLayer(keras.Model):
    def __init__(self):
        super().__init__()
        self.idle = layers.Dense(70)
        self.wide, self.out = layers.Dense(2000, name="wide"), layers.Dense(1)
        self.idle.build([None, 300])
        self.wide.build([None, 6])
        self.out.build([None, 2000])
        self.built = True

    def call(self, x):
        return self.out(self.wide(x))


def a_weight_without_a_gradient(make, folder):
    """The window asks for sums without this weight; all others go by their own wires."""
    strategy = make(sync.LocalSGD(2, start=4), method=Wire("int8", feedback=True))
    with strategy.scope():
        model = WithAnIdleLayer()
        model.compile(keras.optimizers.SGD(1e-4, gradient_accumulation_steps=2), "mse")
    assert len(model.trainable_variables) == 6
    x = np.random.default_rng(0).normal(size=[64, 6])
    losses = model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0], losses
    (row,) = [row for row in strategy.explain() if row.wire == "int8"]
    assert (len(row.variables), row.elements) == (2, 12_000 + 2_000), row
    agree(model)


def each(check, cases):
    """Return the check of each case, under its own name and the case's."""
    return {check.__name__ + name: functools.partial(check, case) for name, case in cases.items()}


SOME = (
    each(silence, SILENT)
    | each(outside_of_replicas, OUTSIDE)
    | each(gossip_of_strangers, GOSSIP_OF_STRANGERS)
    | each(assigned_in_the_middle, ASSIGNED)
    | each(loaded_after_an_interruption, INTERRUPTED)
    | each(interrupted_in_flight, MOMENTS)
)
CHECKS = (
    NUMBERS
    | SOME
    | {
        check.__name__: check
        for check in (
            post_local,
            one_step_rounds,
            never_compiled,
            aggregated,
            programs,
            stream_of_programs,
            stream_of_workers_with_other_numbers_of_batches,
            stream_on_a_wire,
            stream_is_explained,
            assigned_in_flight,
            assigned_at_the_end,
            assigned_what_is_not_trained,
            last_batch_of_one_row,
            a_replica_that_never_had_a_row,
            a_weight_without_a_gradient,
            images_of_any_size,
            workers_with_other_numbers_of_batches,
            read_by_a_callback,
            other_types,
            mixed_precision,
            optimizers,
            refused,
            taken_up_again,
            centre_taken_up_again,
            centre_in_shards,
            assigned_after_loading,
            read_as_a_saved_model,
            saved_by_one_worker,
            gossip_taken_up_again,
            loaded_from_a_training_without_rounds,
            compiled_after_an_interruption,
            callbacks,
            told_if_replicas_end_apart,
        )
    }
)
