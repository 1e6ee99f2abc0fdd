"""Trainings that compute any results again, any number of times: the bits stay the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from helpers import mirrored

import tfscale
from tests.recompute import models
from tests.recompute.models import assert_same_training, chain, data, train
from tests.recompute.orders import OwnStep, PartsStep, RandomOrder
from tests.recompute.test_exact import KINDS, SETTINGS, mark
from tfscale.bridge.tensorflow import uses_onednn
from tfscale.callbacks import Recompute
from tfscale.recompute import BudgetError

ROOT = Path(__file__).parents[2]

# These have several events in which some operations run more than twice.
ALWAYS = ("dropout", "batch norm")


# These take longest; only ``make test-all`` trains them in random orders.
LONGEST = ("excited", "embedding, masks")


def marks(kind):
    if kind in LONGEST:
        return [pytest.mark.full]
    return [] if kind in ALWAYS else mark(kind) or [pytest.mark.slow]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind)) for kind in KINDS])
def test_random_orders_train_the_same(kind):
    plan = assert_same_training(KINDS[kind], RandomOrder(seed=0))
    ops = [op for one in plan.again for op in one.ops]
    assert len(ops) > len(set(ops)) or kind not in ALWAYS


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(1, 5))
def test_more_random_orders_train_the_same(kind, seed):
    assert_same_training(KINDS[kind], RandomOrder(seed))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) for n in SETTINGS])
def test_ways_to_train(name):
    assert_same_training(models.residual, RandomOrder(seed=1), **SETTINGS[name])


@pytest.mark.parametrize("steps", [2, pytest.param(1, marks=pytest.mark.full)])
def test_swishes_are_fused_like_their_originals(steps):
    """TensorFlow does not fuse the first swish of a loop, since it waits for a constant."""
    assert_same_training(models.swishes, RandomOrder(seed=0), steps_per_execution=steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [models.Called, pytest.param(models.Mapped, marks=pytest.mark.full)]
)
def test_functions_are_optimized_like_their_originals(kind):
    """A function may use a result that outside of it only the gradient takes."""
    assert_same_training(lambda: chain(kind), RandomOrder(seed=0))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_random_orders_train_the_same_in_several_steps_at_once(kind):
    assert_same_training(KINDS[kind], RandomOrder(seed=0), steps_per_execution=2)


@pytest.mark.slow
@pytest.mark.parametrize(  # test_a_batch_of_open_size_is_planned_as_fit_traces_it has a transformer
    "kind",
    [pytest.param(kind, marks=[] if kind == "lstm" else [pytest.mark.full]) for kind in KINDS],
)
def test_batches_that_differ_in_size(kind):
    """The step is traced without the size of the batch, and the plan has been made with it."""
    assert_same_training(KINDS[kind], RandomOrder(seed=1), batch=7, epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, pytest.param(7, marks=pytest.mark.full)])
def test_equal_results_of_both_passes_are_merged(batch):
    """TensorFlow orders the factors of an approximate gelu by the name of the square it keeps."""
    assert_same_training(models.approximate, RandomOrder(seed=0), batch=batch)


@pytest.mark.full
@pytest.mark.parametrize("build", [models.tokens, models.mixer])
@pytest.mark.parametrize("seed", [0, 1])
def test_more_sums_of_unknown_length(build, seed):
    assert_same_training(build, RandomOrder(seed), batch=7)


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.full)]
)
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    try:
        assert_same_training(models.residual, RandomOrder(seed=2))
    finally:
        keras.config.set_dtype_policy("float32")


STRATEGIES = {
    "mirrored": mirrored,
    "scale": lambda: tfscale.ScaleStrategy(devices=["CPU:0", "CPU:1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("mirrored", marks=pytest.mark.full), pytest.param("scale")]
)
def test_two_replicas(kind):
    plain, losses = train(models.residual, scope=STRATEGIES[kind](), optimizer="sgd")
    callback = RandomOrder(seed=0)
    ours, our_losses = train(models.residual, callback, scope=STRATEGIES[kind](), optimizer="sgd")
    assert callback.plan.again
    assert losses == our_losses
    assert {k: v.tobytes() for k, v in plain.items()} == {k: v.tobytes() for k, v in ours.items()}


@pytest.mark.slow
def test_own_train_steps():
    def build():
        model = models.residual()
        return OwnStep(model.inputs, model.outputs)

    assert_same_training(build, RandomOrder(seed=3))


@pytest.mark.slow
def test_own_train_steps_may_call_parts_of_a_model():
    """An encoder and a decoder, for example, as in a variational autoencoder."""

    def build():
        model = models.residual()
        *_, pooling, dense = model.layers
        return PartsStep(keras.Model(model.inputs, pooling.output), dense)

    assert_same_training(build, RandomOrder(seed=3))


@pytest.mark.slow
def test_a_plan_of_single_results_is_cheaper_saved_and_trained(tmp_path):
    """A Dense with a gelu: its product is kept, and all else is computed again."""

    def build():
        return models.chain(depth=6, shape=(64, 64))

    callback = Recompute(fraction=0.7, verbose=0, solver="auto", seconds=4)
    plan = assert_same_training(build, callback)
    assert plan.events is not None
    assert plan.bound <= plan.budget
    assert plan.rival is None or plan.overhead < plan.rival.overhead
    plan.save(tmp_path / "plan.json")
    loaded = assert_same_training(build, Recompute(plan=tmp_path / "plan.json", verbose=0))
    assert loaded.again == plan.again
    assert loaded.summary() == plan.summary()
    with pytest.raises(ValueError, match="plan again for this model and batch"):
        train(lambda: models.chain(depth=5, shape=(64, 64)), Recompute(plan=tmp_path / "plan.json"))


@pytest.mark.slow
def test_no_budget_that_segments_keep_is_refused():
    model = models.transformer()
    model.compile("sgd", "mse")
    x, y = data(model)

    def smallest(solver):
        with pytest.raises(BudgetError) as refusal:
            model.fit(x, y, 8, verbose=0, callbacks=[Recompute(budget=100, solver=solver)])
        return refusal.value.smallest

    assert smallest("search") <= smallest("segments")


@pytest.mark.slow
def test_a_batch_of_open_size_is_planned_as_fit_traces_it(caplog):
    """TensorFlow makes other operations for such a batch than for one of known size."""
    plan = assert_same_training(
        models.transformer, Recompute(fraction=0.6, verbose=0, seconds=2), batch=7
    )
    assert plan.events is not None
    assert not [record for record in caplog.records if record.name == "tfscale"]


@pytest.mark.slow
@pytest.mark.skipif(not uses_onednn(), reason="all other tests show it: TensorFlow has no oneDNN")
def test_all_ways_without_onednn():
    """TensorFlow reads the variable when it is loaded, so this takes a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.recompute.workers.ways"],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    same = re.findall(r"^SAME (.*)$", ran.stdout, re.MULTILINE)
    assert same == ["fit", "own step", "mixed", "two steps", "open batch", "convolutions"]
