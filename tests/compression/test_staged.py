"""Stages: nothing is lost between them, and all replicas change at the same step."""

import dataclasses
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compression.methods import Trial, gradients
from tests.exchange.test_slots import assert_same_sum, residuals
from tests.strategy.features import bits
from tfscale import ScaleStrategy
from tfscale.compression import (
    Gradient,
    Kept,
    Method,
    MethodPolicy,
    PowerSGD,
    RandomK,
    Settled,
    Staged,
    TopK,
    Wire,
)

SHAPES = [(12, 20), (7, 5)]


@dataclasses.dataclass(frozen=True)
class Half(Method):
    """A user's own: sends half of each number, and the rest later."""

    def state(self, gradient):
        return {"residual": Kept(gradient.shape)}

    def sums(self, load):
        wholes = [g + rest for g, rest in zip(load.gradients, load.kept("residual"))]
        load.keep("residual", [whole / 2 for whole in wholes])
        return [load.all_reduce(whole / 2, what=str(i)) for i, whole in enumerate(wholes)]


class Training(Trial):
    """A trial whose optimizer counts its steps."""

    def sums(self, given):
        found = super().sums(given)
        self.optimizer.iterations.assign_add(1)
        return found

    @property
    def method(self):
        return self.strategy.explain()[0].method


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "method",
    [
        Staged("int4", "fp32", when=2),
        Staged(PowerSGD(2, saves=0), RandomK(0.2), when=2),
        Staged(Half(), Staged(TopK(0.1), "fp32", when=3), when=1),
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in (
                Staged("int4", TopK(0.2), when=Settled(ratio=0.01, over=1)),
                Staged(TopK(0.1), Half(), when=2),
                Staged("fp32", "sign", when=2),
                Staged("sign", Wire("bf16", True), when=1),
                Staged("sign", Staged("fp32", PowerSGD(1, saves=0), when=3), when=2),
            )
        ),
    ],
    ids=repr,
)
def test_nothing_is_lost_between_stages(method):
    """Check each step, not the end alone."""
    trial, balance = Training(method, SHAPES, 3), [0.0, 0.0]
    methods = set()
    for step in range(6):
        given = gradients(SHAPES, 3, step)
        found, rests = trial.sums(given), trial.kept("residual")
        methods.add(trial.method)
        for i, of_replicas in enumerate(given):
            balance[i] = balance[i] + np.sum(of_replicas, 0, dtype=float) - found[i]
            np.testing.assert_allclose(rests[i].sum(0), balance[i], rtol=0, atol=1e-4)
    assert len(methods) == (3 if isinstance(method.then, Staged) else 2)


@pytest.mark.slow
def test_a_stage_is_as_its_method_alone():
    staged = Training(Staged("fp32", TopK(0.1, momentum=0.5), when=2), SHAPES)
    alone = Training(TopK(0.1, momentum=0.5), SHAPES)
    for step in range(5):
        given = gradients(SHAPES, seed=step)
        expected = [sum(g) for g in given] if step < 2 else alone.sums(given)
        for one, other in zip(staged.sums(given), expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_warm_up_sends_ever_less_and_loses_nothing():
    """Each replica sends 100 of 400 numbers, then 20, and then 4."""
    trial = Training(TopK(0.01).warmed_up(over=4, stages=2), [(20, 20)])
    balance, sent = 0.0, []
    for step in range(6):
        given = gradients([(20, 20)], seed=step)
        (found,) = trial.sums(given)
        balance = balance + sum(each.astype(float) for each in given[0]) - found
        np.testing.assert_allclose(trial.kept("residual")[0].sum(0), balance, rtol=0, atol=1e-4)
        sent.append(np.count_nonzero(found))
    for count, of_each in zip(sent, [100, 100, 20, 20, 4, 4], strict=True):
        assert of_each <= count <= 2 * of_each, sent  # both may send the same places


@pytest.mark.parametrize(("fraction", "over", "stages"), [(0.25, 8, 4), (0.01, 3, 4), (0.01, 8, 0)])
def test_a_warm_up_that_cannot_be_is_refused(fraction, over, stages):
    with pytest.raises(ValueError, match="stages|warm-up"):
        TopK(fraction).warmed_up(over, stages)


def test_full_precision_after_compression_has_nothing_left_to_pay():
    """The residual is paid once: all later results are the sums of the gradients, bit for bit."""
    trial = Training(Staged("sign", "fp32", when=2), [(12, 20)])
    for step in range(3):
        trial.sums(gradients([(12, 20)], seed=step))
    assert not trial.kept("residual")[0].any() and not trial.kept("owed")[0]
    (given,) = gradients([(12, 20)], seed=9)
    np.testing.assert_array_equal(trial.sums([given])[0], sum(given))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_debt_is_not_paid_by_a_step_that_is_not_finite(bad):
    trial = Training(Staged("int4", "fp32", when=1), [(12, 20)])
    trial.sums(gradients([(12, 20)]))
    owed = trial.kept("residual")[0].sum(0)
    assert owed.any()
    spoilt = gradients([(12, 20)], seed=1)
    spoilt[0][1][3, 4] = bad
    assert not np.isfinite(trial.sums(spoilt)[0]).all()
    (given,) = gradients([(12, 20)], seed=2)
    np.testing.assert_allclose(trial.sums([given])[0], sum(given) + owed, rtol=0, atol=1e-5)
    assert not trial.kept("residual")[0].any()


def settles(sizes, over, ratio):
    """The step after which the running mean of squares has settled, as 1-bit Adam has it."""
    mean, before, beta = 0.0, 0.0, 1 - 1 / over
    for step, size in enumerate(sizes, 1):
        mean = beta * mean + (1 - beta) * size
        now = mean / (1 - beta**step)
        if step % over == 0:
            if before and min(now, before) / max(now, before) >= ratio:
                return step
            before = now
    return None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("decay", [0.8, 0.99])
def test_variances_settle_when_the_papers_do(decay):
    over, ratio, steps = 4, 0.8, 30
    trial = Training(Staged("fp32", "int4", when=Settled(ratio, over)), SHAPES)
    sums, methods = [], []
    for step in range(steps):
        size = 1 + 10 * decay**step
        given = [[np.float32(size) * g for g in each] for each in gradients(SHAPES, seed=step)]
        if step == 2:  # one that does not count
            spoilt = [[np.full_like(g, np.nan) for g in each] for each in given]
            trial.sums(spoilt)
        sums.append(sum(np.square(s, dtype=float).sum() for s in trial.sums(given)))
        methods.append(trial.method)
    at = settles(sums, over, ratio)
    assert at is not None and 2 * over <= at < steps
    assert methods == ["fp32"] * at + ["int4 + feedback"] * (steps - at)


@pytest.mark.slow
def test_variances_do_not_settle_before_the_warm_up_is_over():
    trial = Training(Staged("fp32", "int4", when=Settled(0.01, over=1, after=5)), SHAPES)
    methods = []
    for step in range(8):
        trial.sums(gradients(SHAPES, seed=step))
        methods.append(trial.method)
    assert methods == ["fp32"] * 6 + ["int4 + feedback"] * 2


def fitted(method, optimizer, epochs=2, replicas=2, weights=None, eager=False):
    """A regression in batches of 8, the last of one row."""
    keras.utils.set_random_seed(1)
    strategy = ScaleStrategy("ring", None, [f"CPU:{i}" for i in range(replicas)], method=method)
    with strategy.scope():
        model = keras.Sequential([keras.Input([16]), keras.layers.Dense(64, name="dense")])
        model.compile(optimizer(), "mse", run_eagerly=eager)
        model.optimizer.build(model.trainable_variables)
    if weights:
        model.load_weights(weights)
    x = np.random.default_rng(1).standard_normal((33, 16)).astype("float32")
    how = {"batch_size": 8, "shuffle": False, "verbose": 0}
    history = model.fit(x, np.tile(x, 4), epochs=epochs, **how).history
    return model, history.get("loss")


def sgd():
    return keras.optimizers.SGD(0.1, 0.9)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**10)


@pytest.mark.parametrize("at", [7, pytest.param(3, marks=pytest.mark.full)])
def test_a_training_that_is_restored_goes_on_in_its_stage(at, tmp_path):
    """Bit for bit: before and after the change at ``at``, one epoch of five steps being over."""
    method = Staged(PowerSGD(2), TopK(0.1), when=at)
    whole, _ = fitted(method, sgd, epochs=2)
    half, _ = fitted(method, sgd, epochs=1)
    half.save_weights(tmp_path / "half.weights.h5")
    rest, _ = fitted(method, sgd, epochs=1, weights=tmp_path / "half.weights.h5")
    assert bits(rest) == bits(whole)
    assert rest.distribute_strategy.explain()[-1].method == "TopK(0.1) + feedback"
    three, _ = fitted(method, sgd, epochs=0, replicas=3, weights=tmp_path / "half.weights.h5")
    assert_same_sum(residuals(three), residuals(half))
    assert {len(rows) for rows in residuals(three).values()} == {3}


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: keras.optimizers.Lamb(0.01), id="LAMB", marks=pytest.mark.full),
        pytest.param(scaled, id="loss scaling"),
        pytest.param(
            lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
            id="accumulation",
            marks=pytest.mark.full,
        ),
    ],
)
def test_in_fit(optimizer):
    method = {"kernel": Staged("fp32", "sign", when=Settled(0.5, over=2, after=6))}
    model, losses = fitted(method, optimizer, epochs=4)
    assert losses[-1] < losses[0]
    assert model.distribute_strategy.explain()[-1].method == "sign + feedback"


@pytest.mark.full
def test_full_precision_first_is_full_precision():
    exact, _ = fitted({"kernel": "fp32"}, scaled, epochs=1)
    first, _ = fitted({"kernel": Staged("fp32", "sign", when=100)}, scaled, epochs=1)
    assert bits(first) == bits(exact)


@pytest.mark.slow
def test_in_eager_steps():
    method = Staged("fp32", "sign", when=3)
    graph, _ = fitted(method, sgd)
    eager, _ = fitted(method, sgd, eager=True)
    for one, other in zip(eager.get_weights(), graph.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    assert eager.distribute_strategy.explain()[-1].method == "sign + feedback"


def test_what_feedback_guarantees_and_what_not():
    """SGD is linear in the gradient: what is kept is all that its weights lack, at any time. Adam
    is not: a number that comes late and large moves its weight less, and none of it comes back.
    """
    steps = 12
    (each,) = gradients([(12, 20)], seed=3)

    def moved(make, method):
        trial = Trial(method, [(12, 20)])
        weights = tf.Variable(tf.zeros([12, 20]))
        optimizer = make()
        for _ in range(steps):
            optimizer.apply([tf.constant(trial.sums([each])[0])], [weights])
        rest = trial.kept("residual")[0].sum(0) if isinstance(method, TopK) else 0.0
        return weights.numpy(), rest

    exact, _ = moved(lambda: keras.optimizers.SGD(0.1), Wire())
    late, rest = moved(lambda: keras.optimizers.SGD(0.1), TopK(0.1))
    np.testing.assert_allclose(late - 0.1 * rest, exact, rtol=0, atol=1e-5)
    exact, _ = moved(lambda: keras.optimizers.Adam(0.1), Wire())
    late, _ = moved(lambda: keras.optimizers.Adam(0.1), TopK(0.1))
    # All gradients are the same in each step, so that exact Adam moves all weights by 0.1 a step.
    np.testing.assert_allclose(np.abs(exact), 0.1 * steps, rtol=1e-3)
    sent = late != 0
    assert sent.any() and np.abs(late[sent]).mean() < 0.9 * 0.1 * steps


def test_explain_says_which_stage_it_is_and_when_it_ends():
    method = Staged("fp32", Staged(PowerSGD(2, saves=0), "sign", when=Settled()), when=1000)
    trial = Training(method, [(12, 20)])
    trial.sums(gradients([(12, 20)]))
    (row,) = trial.strategy.explain()
    assert (row.method, row.wire, row.feedback, row.calls) == ("fp32", "fp32", False, 1)
    assert row.bytes == row.lossless == 960
    said = re.sub(r"\s+", " ", str(trial.strategy.explain()))
    assert (
        "fp32 until step 1000, then PowerSGD(2) + feedback until variances have settled (ratio "
        "0.96 over 1000 steps), then sign + feedback" in said
    )
    trial.optimizer.iterations.assign(1000)
    trial.sums(gradients([(12, 20)]))
    (row,) = trial.strategy.explain()
    assert (row.method, row.feedback, row.calls) == ("PowerSGD(2) + feedback", True, 1)


def test_policies_choose_stages():
    policy = MethodPolicy.of({"kernel$": Staged("fp32", PowerSGD(4), when=5), "*": "int8"})
    of = {
        ("dense/kernel", (512, 512)): Staged(Wire(), PowerSGD(4), 5),
        ("tiny/kernel", (4, 4)): Wire(),  # no matrix for rank 4: both stages are the same
        ("table", (512, 512)): Wire("int8"),
    }
    for (path, shape), method in of.items():
        assert policy.method_of(Gradient(path, shape, "float32")) == method
        assert method in policy.methods
    assert eval(repr(policy)) == policy
    assert policy != MethodPolicy.of(Staged("fp32", PowerSGD(4), when=6))


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: Staged("fp32", "int7"), "int7"),
        (lambda: Staged("fp32", PowerSGD), "then is .* a method of tfscale.compression"),
        (lambda: Staged("fp32", "sign", when="3 epochs"), "three epochs are 3 . math.ceil"),
        (
            lambda: Staged("fp32", "sign", when=-1),
            "when is Settled.* a number of steps .*, 0 or more; got -1",
        ),
        (lambda: Staged("fp32", "sign", when=True), "got True"),
        (lambda: Settled(ratio=0), "ratio is a number, more than 0 and at most 1; got 0"),
        (lambda: Settled(over=0), "over is a number of steps, 1 or more; got 0"),
        (lambda: Settled(after=0.5), "after is a number of steps, 0 or more; got 0.5"),
        (
            lambda: ScaleStrategy(method=Staged("fp32", "bf16", 5), backend="tensorflow"),
            "cannot change the method while it trains, as Staged",
        ),
    ],
)
def test_refusals_say_what_was_received(wrong, words):
    with pytest.raises((TypeError, ValueError)) as refused:
        wrong()
    assert re.search(words, str(refused.value)), refused.value
