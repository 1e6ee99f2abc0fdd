"""Train steps that apply gradients several times, such as those of GANs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.recompute import phases
from tests.recompute.orders import RandomOrder
from tests.recompute.phases import assert_same_training, train
from tfscale.callbacks import Recompute
from tfscale.recompute import BudgetError, PhasedPlan

SEVERAL = {"gan": phases.Gan, "wgan-gp": phases.WassersteinGan}


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("gan", 1),
        pytest.param("wgan-gp", 1, marks=pytest.mark.slow),
        *(pytest.param(name, 2, marks=pytest.mark.full) for name in ("gan", "wgan-gp")),
    ],
)
def test_gans_train_the_same(name, replicas):
    devices = [f"CPU:{i}" for i in range(replicas)]
    settings = {"scope": tfscale.ScaleStrategy(devices=devices)} if replicas > 1 else {}
    plan = assert_same_training(SEVERAL[name], RandomOrder(seed=1), **settings)
    assert [bool(one.again) for one in plan.phases] == [True] * len(plan.phases)
    assert len(plan.phases) == {"gan": 2, "wgan-gp": 3}[name]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, pytest.param(7, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "kind",
    [phases.Gan, pytest.param(phases.WassersteinGan, marks=pytest.mark.full), phases.Together],
)
def test_more_orders_of_gans(kind, batch):
    assert_same_training(kind, Recompute(segments="sqrt", verbose=0), batch=batch)
    assert_same_training(kind, RandomOrder(seed=2), batch=batch, steps_per_execution=2)


@pytest.mark.slow
def test_one_backward_pass_for_two_optimizers():
    """The gradients that the second optimizer gets belong to the same phase."""
    plan = assert_same_training(phases.Together, RandomOrder(seed=0))
    (alone,) = plan.phases
    weights = sum(v.numpy().size for v in phases.discriminator().trainable_weights)
    weights += sum(v.numpy().size for v in phases.generator().trainable_weights)
    assert sum(alone.step.updated) == 4 * weights


def test_two_backward_passes_through_one_forward_pass_are_refused():
    with pytest.raises(ValueError, match="Call the layers again for the second gradients"):
        train(phases.OneForwardPass, Recompute(segments="sqrt"))


def test_a_gradient_that_computes_a_layer_again_is_refused():
    class Remade(keras.layers.Dense):
        def call(self, x):
            return tf.recompute_grad(lambda x: tf.tanh(super(Remade, self).call(x)))(x)

    model = keras.Sequential([keras.Input((4,)), Remade(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="without tf.recompute_grad: Recompute frees"):
        model.fit(np.ones((4, 4)), np.ones((4, 1)), callbacks=[Recompute(segments="sqrt")])


@pytest.mark.slow
def test_a_budget_holds_for_all_phases(tmp_path, capsys):
    with pytest.raises(BudgetError) as refusal:
        train(phases.Gan, Recompute(budget=1, seconds=1))
    smallest = refusal.value.smallest
    plan = assert_same_training(phases.Gan, Recompute(budget=smallest, seconds=1))
    assert isinstance(plan, PhasedPlan)
    assert max(one.bound for one in plan.phases) == plan.bound <= smallest < plan.plain_bound
    assert 0 < plan.overhead < 1
    assert "phase 2 of 2:" in capsys.readouterr().out
    plan.save(tmp_path / "plan.json")
    loaded = assert_same_training(phases.Gan, Recompute(plan=tmp_path / "plan.json", verbose=0))
    assert loaded.again == plan.again
    assert loaded.draw().axes
    with pytest.raises(ValueError, match="plan again for this model and batch"):
        train(phases.Gan, Recompute(plan=tmp_path / "plan.json"), batch=4)
    with pytest.raises(ValueError, match="plan again for this model and batch"):
        train(phases.WassersteinGan, Recompute(plan=tmp_path / "plan.json"))


@pytest.mark.slow
def test_layers_are_found_in_all_phases():
    plan = assert_same_training(phases.Gan, Recompute(layers=["generator"], verbose=0))
    assert all(one.again for one in plan.phases)  # the discriminator needs what it makes
    with pytest.raises(ValueError, match="no layer named 'nobody'"):
        train(phases.Gan, Recompute(layers=["nobody"]))


def test_a_phase_begins_when_the_one_before_has_changed_its_weights():
    """Otherwise TensorFlow would hold the results of both at the same time."""
    model = phases.Gan()
    model.compile()
    step = tfscale.recompute.trace(model, tf.TensorSpec([8, 8, 8, 1]))
    plan = tfscale.recompute.plan_sqrt(step)
    graphs = []

    class Keeps(phases.Gan):
        def train_step(self, real):
            graphs.append(tf.compat.v1.get_default_graph())
            return super().train_step(real)

    model = Keeps()
    model.compile()
    with tfscale.recompute.recomputing(model, plan):
        model.fit(np.ones((8, 8, 8, 1), np.float32), batch_size=8, verbose=0)
    by_name = {op.name: op for op in graphs[-1].get_operations()}
    gate = by_name["again/phase/open"]
    assert any("Assign" in op.type for op in gate.inputs[0].op.control_inputs)
    reads = [op for op in by_name.values() if op.type == "ReadVariableOp"]
    waiting = [op for op in reads if gate in op.control_inputs]
    held = {id(op.inputs[0]) for op in waiting}
    assert len(held) >= len(model.trainable_variables)
