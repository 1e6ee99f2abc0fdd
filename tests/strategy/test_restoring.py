"""A step may build variables: a checkpoint that was restored before goes to all replicas."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.strategy.doubles import doubles
from tfscale.bridge.installed import KERAS_2
from tfscale.parallel import deal

pytestmark = [
    pytest.mark.skipif(KERAS_2, reason="Keras 2 builds optimizers in another way"),
    pytest.mark.timeout(120),
]

RULES = {"up": "columns"}
SETTINGS = {
    "copies": {},
    "shards": {"shard": "optimizer"},
    "parts": {"shard": "all"},
    "slices": {"grid": tfscale.Grid(tensor=2), "tensor": RULES},
}
X = np.random.default_rng(0).standard_normal((30, 6))
Y = X[:, :3] ** 2


class TwoOptimizers(keras.Model):
    """A model whose second optimizer is built in its first step."""

    def compile(self, **more):
        super().compile(**more)
        self.other = keras.optimizers.Adam(0.01)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        first, last = (self.get_layer(name).trainable_variables for name in ("up", "last"))
        gradients = tape.gradient(loss, [*first, *last])
        self.optimizer.apply_gradients(zip(gradients[:2], first, strict=True))
        self.other.apply_gradients(zip(gradients[2:], last, strict=True))
        return {"loss": loss}


class Unbuilt(keras.Model):
    """A model whose layers are built in its first step, or just before."""

    def __init__(self):
        super().__init__()
        self.up, self.last = keras.layers.Dense(4, "tanh", name="up"), keras.layers.Dense(3)

    def call(self, x):
        return self.last(self.up(x))


def two_optimizers():
    inputs = keras.Input([6])
    hidden = keras.layers.Dense(4, "tanh", name="up")(inputs)
    return TwoOptimizers(inputs, keras.layers.Dense(3, name="last")(hidden))


def by_fit(model):
    model.fit(X, Y, 10, 2, 0, shuffle=False)


def by_a_loop(model):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / 10
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)

    strategy = tf.distribute.get_strategy()
    run = tf.function(lambda *rows: strategy.run(step, rows))
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    for batch in strategy.experimental_distribute_dataset(rows):
        run(*batch)


PROGRAMS = {
    "two optimizers": (two_optimizers, by_fit),
    "unbuilt": (Unbuilt, by_fit),
    "unbuilt, by a loop": (Unbuilt, by_a_loop),
}


def checkpoint(model):
    other = {"other": model.other} if hasattr(model, "other") else {}
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer, **other)


def trained(strategy, program, path, restores, builds=False):
    """Return the numbers of a model that is trained; it begins with a checkpoint, or writes one."""
    make, train = PROGRAMS[program]
    keras.utils.set_random_seed(1)
    with doubles(), strategy.scope():
        model = make()
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
        if builds:
            model(X[:1])
        if restores:
            checkpoint(model).restore(path)
        train(model)
        if not restores:
            path = checkpoint(model).save(path)
        slots = [*getattr(model, "other", model.optimizer).variables]
        return path, [v.numpy() for v in [*model.weights, *slots]]


@functools.cache
def on_one_device(program, folder):
    """Return a checkpoint's path, and the numbers of a model that was built, then restored."""
    alone = tf.distribute.get_strategy()
    path, _ = trained(alone, program, str(folder / program), restores=False)
    return path, trained(alone, program, path, restores=True, builds=True)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


QUICK = {("copies", "two optimizers"), ("parts", "unbuilt, by a loop")}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("settings", "program"),
    [
        pytest.param(each, program, marks=[] if (each, program) in QUICK else pytest.mark.full)
        for each in SETTINGS
        for program in PROGRAMS
        if each != "slices" or program == "two optimizers"
    ],
)
def test_what_a_step_builds_is_restored_on_all_replicas(monkeypatch, folder, settings, program):
    monkeypatch.setattr(deal, "SMALL", 1)
    path, expected = on_one_device(program, folder)
    devices = ["CPU:0", "CPU:1"]
    strategy = tfscale.ScaleStrategy("ring", devices=devices, deadline=60, **SETTINGS[settings])
    _, found = trained(strategy, program, path, restores=True)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


class SlotsInUpdates(keras.optimizers.Optimizer):
    def update_step(self, gradient, variable, learning_rate):
        slot = self.add_variable_from_reference(variable, name="slot")
        self.assign_sub(variable, slot + gradient)


def test_an_optimizer_that_makes_slots_in_its_updates_is_refused():
    with tfscale.ScaleStrategy("ring", devices=["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(3, name="last")])
        model.compile(SlotsInUpdates(0.1), "mse")
    with pytest.raises(ValueError, match=r"a slot of \S+kernel in update_step.*build\(\)"):
        model.fit(X, Y, verbose=0)
