"""Methods that are chosen on live steps: nothing is lost, and all replicas change together."""

import contextlib
import re

import keras
import numpy as np
import pytest

from tests.compression.methods import Trial, gradients, of_two_processes
from tests.compression.test_staged import Half, fitted, scaled, sgd
from tests.exchange.test_slots import assert_same_sum, residuals
from tests.strategy.features import bits
from tfscale import ScaleStrategy
from tfscale.compression import (
    Adaptive,
    Gradient,
    MethodPolicy,
    PowerSGD,
    RandomK,
    Staged,
    TopK,
    Wire,
    adaptation,
    deciding,
)

SHAPES = [(12, 20), (7, 5)]
AMONG = ("int4", PowerSGD(2, saves=0), TopK(0.1), RandomK(0.2), Half())


@contextlib.contextmanager
def scripted(monkeypatch, methods):
    """Decisions are made after each step: one bucket's methods, one after the other, as said."""

    class Scripted(deciding.Decider):
        def decide(self, ranks, current, step):
            self._learn([list(turn) for turn in zip(*ranks)], False)
            self.taken = getattr(self, "taken", 0) + 1
            following = methods[self.taken % len(methods)]
            self.current = [following] * len(self.buckets)
            return deciding.window("rest", 1)

    with monkeypatch.context() as patch:
        patch.setattr(adaptation, "Decider", Scripted)
        patch.setattr(deciding, "FIRST", 1)
        yield


@contextlib.contextmanager
def eager_to_change(monkeypatch):
    """A decider that tries much and takes all that it tries: toys teach nothing about time."""

    def price(self, bucket, method):
        return -float(method + self._looks % 3)

    with monkeypatch.context() as patch:
        patch.setattr(deciding.Decider, "price", price)
        patch.setattr(deciding, "PAYS", 1e6)
        patch.setattr(deciding, "_mostly_below", lambda limit, turns: True)
        patch.setattr(deciding, "INTERVAL", (4, 8))
        patch.setattr(deciding, "REST", (2, 4))
        yield


def deciders(strategy):
    """Return the deciders of all replicas of this process."""
    (packing,) = strategy.reducer.packings.values()
    return [each.decider for each in packing.shared.values()]


@pytest.mark.slow
def test_nothing_is_lost_when_methods_change(monkeypatch):
    """Change from each method to each other, also to exact sums; one step is not finite."""
    order = [0, 1, 2, 3, 4, 5, 0, 3, 1, 0, 5, 4, 2, 0]
    with scripted(monkeypatch, order):
        trial, balance = Trial(Adaptive(1.0, AMONG), SHAPES), [0.0, 0.0]
        for step, method in enumerate(order):
            given = gradients(SHAPES, 2, step)
            if step in (4, 6, 8):
                spoilt = [[g.copy() for g in each] for each in given]
                spoilt[0][1][:] = np.nan
                before = trial.kept("residual")
                assert not np.isfinite(trial.sums(spoilt)[0]).all()
                for one, other in zip(trial.kept("residual"), before):
                    np.testing.assert_array_equal(one, other)
                continue
            found, rests = trial.sums(given), trial.kept("residual")
            (row,) = trial.strategy.explain()
            assert row.method == str(Adaptive(1.0, AMONG).variants[method])
            for i, of_replicas in enumerate(given):
                balance[i] = balance[i] + np.sum(of_replicas, 0, dtype=float) - found[i]
                np.testing.assert_allclose(rests[i].sum(0), balance[i], rtol=0, atol=1e-4)
            if method == 0:
                assert not any(rest.any() for rest in rests)


@pytest.mark.slow
def test_errors_are_as_they_are_defined(monkeypatch):
    with scripted(monkeypatch, [2]):
        trial = Trial(Adaptive(1.0, ("int8", "int4")), SHAPES, 3)
        for step in range(3):
            before = trial.kept("residual") if step else [np.zeros((3, *s)) for s in SHAPES]
            given = gradients(SHAPES, 3, step)
            trial.sums(given)
            wholes = [np.square(np.stack(g) + rest).sum() for g, rest in zip(given, before)]
            rests = [np.square(rest).sum() for rest in trial.kept("residual")]
            if step:  # the first one is exact
                error = deciders(trial.strategy)[0].errors[0][2]
                assert error == pytest.approx((sum(rests) / sum(wholes)) ** 0.5, rel=1e-4)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(scaled, id="Adam, loss scaling"),
        pytest.param(lambda: keras.optimizers.Lamb(0.01), id="LAMB", marks=pytest.mark.full),
        pytest.param(
            lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
            id="accumulation",
            marks=pytest.mark.full,
        ),
    ],
)
def test_in_fit(optimizer, monkeypatch):
    """The last batch has one row, and another graph, which goes on with the same window."""
    with eager_to_change(monkeypatch):
        among = ("int8", PowerSGD(2, saves=0), TopK(0.1))
        model, losses = fitted({"kernel": Adaptive(1.0, among)}, optimizer, epochs=12)
    strategy = model.distribute_strategy
    assert losses[-1] < losses[0]
    first, second = deciders(strategy)
    assert first.changes == second.changes and first.changes
    (row,) = [row for row in strategy.explain() if "kernel" in row.variables[0]]
    among = {"int8 + feedback", "PowerSGD(2) + feedback", "TopK(0.1) + feedback"}
    assert {change.after for change in first.changes} & among
    last = first.changes[-1]  # if exact sums happened to be as fast, it is back to them
    said = re.sub(r"\s+", " ", str(strategy.explain()))
    assert "adaptive, with an error of at most 1" in said
    assert f"{last.after} from step {last.step} on, as " in said
    assert row.calls > 0


@pytest.mark.slow
def test_it_stays_exact_where_nothing_is_within_the_bound(monkeypatch):
    with eager_to_change(monkeypatch):
        method = {"kernel": Adaptive(0.01, ("int4", "sign"))}
        model, _ = fitted(method, sgd, epochs=8)
    decider, _ = deciders(model.distribute_strategy)
    assert not decider.changes and decider.current == [0]
    assert min(decider.errors[0][1:]) > 0.01  # which is known, as it was tried


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, pytest.param(0, marks=pytest.mark.full)])
def test_a_training_that_is_restored_goes_on_with_what_was_in_use(number, monkeypatch, tmp_path):
    """Bit for bit as long as the same is in use; and with other replicas nothing is lost."""
    method, file = Adaptive(1.0, ("int8", TopK(0.1))), tmp_path / "half.weights.h5"
    with scripted(monkeypatch, [1, *[number] * 30]):
        whole, _ = fitted(method, sgd, epochs=2)
        half, _ = fitted(method, sgd, epochs=1)
        half.save_weights(file)
        with scripted(monkeypatch, [number]):
            rest, _ = fitted(method, sgd, epochs=1, weights=file)
            assert bits(rest) == bits(whole)
            if number:
                three, _ = fitted(method, sgd, epochs=0, replicas=3, weights=file)
                assert_same_sum(residuals(three), residuals(half))


@pytest.mark.full
def test_eager_steps_go_on_with_what_is_in_use(monkeypatch, tmp_path):
    """Eager steps keep the method in use, and measure nothing."""
    method, file = Adaptive(1.0, ("int8", TopK(0.1))), tmp_path / "half.weights.h5"
    with scripted(monkeypatch, [2]):
        half, _ = fitted(method, sgd, epochs=1)
    half.save_weights(file)
    eager, losses = fitted(method, sgd, epochs=1, weights=file, eager=True)
    strategy = eager.distribute_strategy
    assert strategy.explain()[-1].method == "TopK(0.1) + feedback"
    assert next(iter(strategy.reducer.packings.values())).shared == {}
    assert np.isfinite(losses).all()


@pytest.mark.slow
def test_two_processes_change_at_the_same_steps():
    weights, changes = of_two_processes("adapt.py")
    assert changes and np.isfinite(weights).all()


def test_policies_choose_among_what_suits():
    policy = MethodPolicy.of({"table": "bf16", "*": "adaptive"})
    usual = policy.method_of(Gradient("dense/kernel", (512, 512), "float32"))
    assert usual == Adaptive() == MethodPolicy.of("adaptive").method
    narrow = policy.method_of(Gradient("dense/kernel", (512, 4), "float32"))  # no rank 4
    assert narrow.among == tuple(m for m in Adaptive().among if not isinstance(m, PowerSGD))
    assert policy.method_of(Gradient("dense/bias", (512,), "float32")) == Wire()
    assert policy.method_of(Gradient("table", (512, 512), "float32")) == Wire("bf16")
    assert eval(repr(policy)) == policy


@pytest.mark.parametrize(
    "wrong, words",
    [
        (
            lambda: Adaptive(0),
            "relative error of a step, more than 0 and at most 1, such as 0.1; got 0",
        ),
        (lambda: Adaptive(among=()), r"among is a list of 1 to 8 methods.*got \(\)"),
        (lambda: Adaptive(among="int8"), "among is a list of 1 to 8 methods.*got 'int8'"),
        (lambda: Adaptive(among=("int7",)), "int7"),
        (lambda: Adaptive(among=(Wire("int8"),)), "Pass feedback=True to the method"),
        (lambda: Adaptive(among=(TopK(0.1, feedback=False),)), "Pass feedback=True to the method"),
        (lambda: Adaptive(among=(Staged("fp32", "sign"),)), "cannot be among the methods"),
        (
            lambda: Staged("fp32", Adaptive()),
            "chooses a method for whole steps, so it cannot be part",
        ),
        (lambda: MethodPolicy.of(7), "'adaptive' or a method of .*; got 7"),
        (
            lambda: ScaleStrategy(method="adaptive", backend="tensorflow"),
            "cannot change the method while it trains, as Adaptive",
        ),
    ],
)
def test_refusals_say_what_was_received(wrong, words):
    with pytest.raises((TypeError, ValueError)) as refused:
        wrong()
    assert re.search(words, str(refused.value)), refused.value
