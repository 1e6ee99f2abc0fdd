"""Planned memory: by hand for known models, as a command, and its refusals."""

import dataclasses
import re

import keras
import numpy as np
import pytest

from tests.helpers import ROOT
from tfscale.bridge.objects import native
from tfscale.compression import MethodPolicy, Wire
from tfscale.parallel.memory import of_training
from tfscale.parallel.planned import Array, Needs, Weight, planned
from tfscale.tools import cli

PROGRAM = """
import keras

def model():
    made = bare()
    made.compile("adam", "mse")
    return made

def bare():
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(4), keras.layers.Dense(1)])

def unbuilt():
    return keras.Sequential([keras.layers.Dense(4)])

def needs_more(size):
    return None

number = 3
"""
KERNEL, BIAS = Array((1000, 10), "float32"), Array((10,), "float32")


def needs(slots=2, **more):
    weights = (
        Weight("a/kernel", KERNEL, (KERNEL,) * slots),
        Weight("a/bias", BIAS, (BIAS,) * slots),
    )
    return Needs(weights, (BIAS,), activations=1000, batch=16, **more)


def test_by_hand():
    one = planned(needs(), 1)
    assert dataclasses.astuple(one.most) == (40080, 80080, 0, 40040, 0, 0, 1000)
    four = planned(needs(), 4).most
    assert (four.kept, four.gradients, four.buffers) == (40080 + 80080, 40040, 40040)
    assert four.total == 120160 + 40040 + 40040


@pytest.mark.parametrize("even, slots", [(True, 20000 + 24), (False, 80000)])
def test_shards_by_hand(even, slots):
    """Equal parts hold a quarter, with padding; dealt weights stay whole at one rank."""
    shared = planned(needs(even=even), 4, "optimizer")
    assert shared.most.slots == slots
    assert shared.least.slots == (slots if even else 0)
    assert shared.most.gradients == slots // 2
    assert shared.on(1, "optimizer").most.slots == planned(needs(), 1).most.slots


def test_weights_in_parts_by_hand():
    """The kernel of 10,000 numbers is cut, and the small bias stays a copy."""
    four = planned(needs(even=True), 4, "all").most
    assert (four.weights, four.slots, four.gradients) == (10080, 20080, 10040)
    assert (four.whole, four.buffers) == (5 * 40000, 0)
    assert four.total == 10080 + 20080 + 10040 + 5 * 40000 + 1000


@pytest.mark.parametrize("ranks, residuals", [(1, 0), (2, 40000)])
def test_a_wire_with_feedback_keeps_residuals(ranks, residuals):
    """The bias is sent exactly, and one device sends nothing."""
    method = Wire("int4", feedback=True)
    assert planned(needs(), ranks, policy=MethodPolicy(method)).most.residuals == residuals


def made(optimizer, **more):
    layers = [
        keras.Input([6, 6, 2]), keras.layers.Conv2D(3, 3), keras.layers.BatchNormalization(),
        keras.layers.Flatten(), keras.layers.Dense(5),
    ]  # fmt: skip
    model = keras.Sequential(layers)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **more)
    return model


OPTIMIZERS = {
    "Adam, EMA": lambda: keras.optimizers.Adam(use_ema=True),
    "SGD, accumulation": lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
    "Adafactor": keras.optimizers.Adafactor,
    "Muon": keras.optimizers.Muon,
    "RMSprop, scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.RMSprop(centered=True)
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_slots_are_those_that_the_optimizer_makes(make):
    optimizer = make()
    model = made(optimizer)
    found = of_training(model, batch=4).most
    assert not optimizer.built
    optimizer.build(model.trainable_variables)
    every = [native(v) for v in optimizer.variables if len(v.shape)]
    assert found.slots == sum(v.dtype.size * int(np.prod(v.shape)) for v in every)
    assert found.weights == sum(4 * int(np.prod(v.shape)) for v in model.variables)


def test_activations_grow_with_the_samples_of_a_replica():
    one, four = (of_training(made("sgd"), 64, replicas).most.activations for replicas in (1, 4))
    assert 3 < one / four < 4.5
    # the batch, the convolution, its normalization and two gradients of it
    assert one > 64 * 4 * (6 * 6 * 2 + 2 * 4 * 4 * 3)


def test_a_model_that_is_not_compiled_or_not_built():
    bare = keras.Sequential([keras.layers.Dense(4)])
    with pytest.raises(ValueError, match="not built.*pass input_shape=.*or example="):
        of_training(bare, 8)
    found = of_training(bare, 8, input_shape=[3])
    assert "Adam and a loss of the outputs alone are assumed" in str(found).replace("\n  ", " ")
    assert found.most.slots == 2 * 4 * (3 * 4 + 4)


class Two(keras.Model):
    """A model that is built by its first batch, and takes a dict."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs):
        return self.dense(inputs["a"])


def test_an_example_builds_a_model():
    model = Two()
    model.compile("adam", "mse")
    example = ({"a": np.zeros([2, 5], np.float32)}, np.zeros([2, 3], np.float32))
    assert of_training(model, 8, example=example).most.weights == 4 * (5 * 3 + 3)


def test_a_step_that_cannot_be_traced_asks_for_an_example():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4)])
    model.compile("sgd", lambda y, z: keras.ops.reshape(y, [-1, 7]) - z)
    with pytest.raises(ValueError, match=r"(?s)cannot be traced.*Pass example=\(x, y\)"):
        of_training(model, 3)


# ------------------------------------------------------------------ the command


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program_of_memory.py"
    file.write_text(PROGRAM)
    return file


def printed(capsys, *words):
    status = cli.main(["memory", *map(str, words)])
    return status, *capsys.readouterr()


def test_the_command_says_whether_it_fits(program, capsys):
    words = [f"{program}:model", "--batch", 8, "--replicas", 2]
    status, out, err = printed(capsys, *words, "--memory", "16GB")
    assert (status, err) == (0, "") and "It fits: " in out
    assert "Memory of each of 2 replicas, 4 samples in a step of each, Adam\n" in out
    status, out, _ = printed(capsys, *words, "--memory", "900")
    assert status == 1
    assert "It does not fit: " in out and "--shard optimizer needs " in out
    assert printed(capsys, *words, "--shard", "optimizer")[0] == 0


@pytest.mark.parametrize(
    "model, words",
    [
        ("absent.py:model", "there is no file"),
        ("absent.keras", "there is no file"),
        ("train", "expected FILE.py:NAME or a .keras file"),
        ("{}:modl", "has no 'modl'.*Did you mean 'model'"),
        ("{}:number", "'number' of .* is or returns a int; expected a Keras model"),
        ("{}:needs_more", "called without arguments and raised"),
        ("{}:unbuilt", "not built"),
    ],
)
def test_refusals(model, words, program, capsys):
    status, out, err = printed(capsys, model.format(program))
    assert (status, out) == (1, "")
    assert err.startswith("tfscale memory: error: ")
    assert re.search(words, err)


def test_the_command_is_on_the_page():
    assert "`tfscale memory`" in (ROOT / "docs" / "commands.md").read_text()
