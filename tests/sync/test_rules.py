"""Rules on several devices of one process, and on several processes."""

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategy.groups import SECONDS
from tests.sync.checks import CHECKS, NUMBERS, Middle, fit, regression, same, sample, save_all
from tfscale import ScaleStrategy, sync

pytestmark = pytest.mark.timeout(SECONDS + 60)
WORKER = Path(__file__).parent / "workers" / "check.py"

# What `make test` does in several processes; it does the others on several devices, and leaves
# some of them to `make test-all`.
PROCESSES = {"diloco", "silence", "workers_with_other_numbers_of_batches"}
PROCESSES |= {"stream", "stream_of_workers_with_other_numbers_of_batches"}
PROCESSES |= {"read_by_a_callback", "gossip_by_an_own_graph", "saved_by_one_worker"}
BOTH = {"told_if_replicas_end_apart"}  # on several devices, too
PROCESSES |= BOTH
SELDOM = {"local_sgd", "growing", "diloco_with_another_outer", "one_step_rounds"}
SELDOM |= {"gossip_in_a_ring", "gossip_in_pairs", "gossip_by_an_own_graph"}
SELDOM |= {"fragments", "stream_of_one_fragment", "stream_of_programs"}
SELDOM |= {
    "silence of means",
    "outside_of_replicas by other rules",
    "gossip_of_strangers in each step",
}
SELDOM |= {"assigned_in_the_middle by other rules", "loaded_after_an_interruption by DiLoCo"}
SELDOM |= {"interrupted_in_flight at the end of a round"}
SELDOM |= {"programs", "mixed_precision", "optimizers", "other_types"}

QUICK = {"local_sgd_of_momenta", "post_local"}  # on two devices
QUICK_PROCESSES = {"diloco", "stream", "silence", "saved_by_one_worker"}


def make(devices, sync, **settings):
    names = [f"CPU:{i}" for i in range(devices)]
    return ScaleStrategy("ring", None, names, sync=sync, **settings)


@pytest.mark.parametrize("case", sample(CHECKS, SELDOM | PROCESSES - BOTH, pytest.mark.slow, QUICK))
def test_two_devices(case, tmp_path):
    keras.utils.set_random_seed(1)
    CHECKS[case](functools.partial(make, 2), tmp_path)


@pytest.mark.parametrize("case", sample(NUMBERS, NUMBERS.keys() - {"elastic", "gossip"}))
def test_four_devices(case, tmp_path):
    CHECKS[case](functools.partial(make, 4), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("readers", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_a_centre_is_read_by_another_number_of_replicas(readers, tmp_path):
    """Though shards have other sizes then; 1: no strategy."""

    def keep(model):
        save_all(model, tmp_path)
        return model.get_weights()

    def from_keras(scope, make):
        with scope:
            return keras.models.load_model(tmp_path / "model.keras")

    def from_weights(scope, make):
        model = make()
        with scope:
            model.optimizer.build(model.trainable_variables)
        model.load_weights(tmp_path / "own.weights.h5")
        return model

    def from_checkpoint(scope, make):
        model = make()
        restored = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        restored.restore(str(tmp_path / "point"))
        return model

    rule, middle = sync.ElasticAveraging(4, 0.2), Middle(keep, 6)
    fit(regression(make(4, rule)), callbacks=[middle])
    for read in (from_keras, from_weights, from_checkpoint):
        strategy = make(readers, rule) if readers > 1 else tf.distribute.get_strategy()
        model = read(strategy.scope(), functools.partial(regression, strategy))
        same(model, middle.seen, atol=0)
        look = Middle(lambda model: model.get_weights(), 1)
        fit(model, callbacks=[look])
        if readers > 1:  # before the round's end they read as the centre, which has not moved
            for found, expected in zip(look.seen, middle.seen, strict=True):
                np.testing.assert_array_equal(found, expected)


class Adds(sync.Rule):
    """A user's, that counts how far all replicas have gone."""

    every = 4
    keeps = ("changes",)

    def __init__(self, in_shards):
        self.in_shards = in_shards

    def end(self, round):
        own = [weight.read_value() for weight in round.weights]
        means = round.mean(own)
        round.add("changes", [value - mean + 1 for value, mean in zip(own, means)])
        for weight, mean in zip(round.weights, means):
            weight.assign(mean)


def test_a_rule_adds_to_what_is_in_shards():
    model = regression(make(3, Adds(("changes",))))
    fit(model)  # three rounds of three replicas, whose distances from the mean sum to 0
    for kept in model.optimizer._tfscale_memory.named("changes").values():
        np.testing.assert_allclose(kept.numpy(), np.full(kept.slot.shape, 9.0), atol=1e-5)
    with pytest.raises(ValueError, match="'changes' is not in shards"):
        fit(regression(make(3, Adds(()))))


class TooFew(sync.Rule):
    """A user's, that forgets all weights but the first."""

    every = 4

    def end(self, round):
        round.mean([round.weights[0].read_value()])


def test_too_few_values_are_refused():
    with pytest.raises(
        ValueError, match=r"passes 1 values to round.mean; .* each of the \d weights"
    ):
        fit(regression(make(2, TooFew())))


@pytest.mark.parametrize(
    "case",
    sample(CHECKS, CHECKS.keys() - PROCESSES, pytest.mark.slow, QUICK_PROCESSES),
)
@pytest.mark.parametrize("layout", ["2x1"])
def test_two_processes(passes, layout, case):
    passes(layout, case)


@pytest.mark.full
@pytest.mark.parametrize("case", CHECKS)
@pytest.mark.parametrize("layout", ["2x2"])
def test_two_processes_of_two_devices(passes, layout, case):
    passes(layout, case)
