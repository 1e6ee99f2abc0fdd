"""Residuals and seeds belong to a training: they are kept, saved, restored and shared out."""

from __future__ import annotations

import dataclasses
import json

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.strategy.features import StopBefore, bits
from tfscale import ScaleStrategy
from tfscale.compression import Kept, Method, PowerSGD, RandomK, TopK

FEATURES, BATCH = 16, 8
# By their places; biases are small.
KERNELS = ("0", "2")
METHODS = {
    "first": PowerSGD(2, factors="bf16"),
    "second/kernel": TopK(0.05, momentum=0.5),
    "head/kernel": RandomK(0.5),
}


def on(replicas, wire="int4", **arguments):
    return ScaleStrategy("ring", wire, [f"CPU:{i}" for i in range(replicas)], **arguments)


def by(kind, replicas=2, **arguments):
    if kind == "methods":
        return on(replicas, None, method=METHODS, **arguments)
    return on(replicas, kind, **arguments)


@pytest.fixture(scope="module", params=[pytest.param("int4", marks=pytest.mark.slow), "methods"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def two(kind):
    return by(kind)


def build(strategy, seed=1):
    """A model whose masks differ from step to step: a training that goes on must know them."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        inputs = keras.Input([FEATURES])
        hidden = layers.Dropout(0.3)(layers.Dense(64, "tanh", name="first")(inputs))
        outputs = layers.Dense(1, name="head")(layers.Dense(32, name="second")(hidden))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01, 0.9), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)  # else Keras restores nothing into it
    return model


def train(model, epochs=1, batch_size=BATCH, **settings):
    x = np.random.default_rng(1).standard_normal((3 * BATCH, FEATURES), np.float32)
    how = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
    return model.fit(x, x.sum(1, keepdims=True), epochs=epochs, **how, **settings)


def residuals(model):
    """Return the residuals by place: one row for each replica."""
    kept = model.optimizer._tfscale_memory.named("residual")
    return {place: variable.numpy() for place, variable in kept.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for place, value in expected.items():
        np.testing.assert_array_equal(found[place], value)


def assert_same_sum(found, expected):
    """Over replicas, but for rounding: n float32 are added up, n times, to n times the largest."""
    for place, rows in expected.items():
        sums = [np.sum(each, axis=0, dtype=np.float64) for each in (found[place], rows)]
        rounding = 2.0**-24 * len(rows) ** 2 * np.abs(rows).max()
        np.testing.assert_allclose(*sums, rtol=0, atol=rounding)


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


class Saved:
    """A training that was saved in all ways after one epoch, and went on."""

    def __init__(self, strategy, folder):
        model = build(strategy)
        train(model)
        self.residuals, self.bits = residuals(model), bits(model)
        self.weights_file, self.file = folder / "saved.weights.h5", folder / "saved.keras"
        model.save_weights(self.weights_file)
        model.save(self.file)
        self.checkpoint = checkpoint(model).save(str(folder / "checkpoint"))
        train(model)
        self.bits_later = bits(model)


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    return Saved(two, tmp_path_factory.mktemp("saved"))


def test_something_is_lost_and_remembered(kind, saved):
    assert tuple(saved.residuals) == (KERNELS if kind == "int4" else (*KERNELS, "4"))
    for rows in saved.residuals.values():
        assert len(rows) == 2
        assert np.abs(rows).max(axis=(1, 2)).min() > 0
        assert (rows[0] != rows[1]).any()


@pytest.fixture(scope="module")
def other(two, saved):
    """A model that has trained otherwise, and that the ways of restoring share."""
    model = build(two, seed=2)
    train(model)
    return model


def assert_goes_on(model, saved):
    assert_same(residuals(model), saved.residuals)
    train(model)
    assert bits(model) == saved.bits_later


def test_weights_file_restores_it(other, saved):
    other.load_weights(saved.weights_file)
    assert_goes_on(other, saved)


def test_checkpoint_restores_it(other, saved):
    checkpoint(other).restore(saved.checkpoint).assert_consumed()
    assert_goes_on(other, saved)


def test_checkpoint_restores_it_into_a_model_that_has_not_trained(two, saved):
    model = build(two, seed=2)
    status = checkpoint(model).restore(saved.checkpoint)
    train(model)
    status.assert_consumed()
    assert bits(model) == saved.bits_later


@pytest.mark.slow
def test_keras_file_restores_it_into_a_model_that_has_not_trained(two, saved, tmp_path):
    with two.scope():
        model = keras.models.load_model(saved.file)
    model.save(tmp_path / "again.keras")  # at once: nothing was there but what was read
    with two.scope():
        again = keras.models.load_model(tmp_path / "again.keras")
    assert_goes_on(again, saved)


def test_backup_restores_it(two, saved, tmp_path):
    """Interrupted and taken up by a fresh model is the same as never interrupted."""
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    with pytest.raises(InterruptedError):
        train(build(two), 2, callbacks=[backup, StopBefore(1)])
    resumed = build(two, seed=2)
    history = train(resumed, 2, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert history.epoch == [1]
    assert bits(resumed) == saved.bits_later


def test_a_file_without_it_begins_anew(other, saved, tmp_path):
    alone = build(tf.distribute.get_strategy())
    alone.save_weights(tmp_path / "alone.weights.h5")
    train(other)
    other.load_weights(tmp_path / "alone.weights.h5")
    assert bits(other) == bits(alone)
    for rows in residuals(other).values():
        np.testing.assert_array_equal(rows, 0)


def test_keras_alone_reads_such_files(saved):
    loaded = keras.models.load_model(saved.file)
    assert bits(loaded) == saved.bits
    model = build(tf.distribute.get_strategy(), seed=2)
    model.load_weights(saved.weights_file)
    assert bits(model) == saved.bits
    train(model)
    train(loaded)
    assert bits(model) != saved.bits


def test_another_number_of_replicas_shares_it_out(kind, other, saved, tmp_path):
    """Two to four to two: what is owed to the model stays the same."""
    four = build(by(kind, 4), seed=2)
    four.load_weights(saved.weights_file)
    assert_same_sum(residuals(four), saved.residuals)
    train(four)
    owed = residuals(four)
    assert {len(rows) for rows in owed.values()} == {4}
    assert any(np.abs(owed[p].sum(0) - saved.residuals[p].sum(0)).max() > 0.01 for p in KERNELS)

    path = checkpoint(four).save(str(tmp_path / "four"))
    checkpoint(other).restore(path)
    assert {len(rows) for rows in residuals(other).values()} == {2}
    assert_same_sum(residuals(other), owed)
    train(other)


@pytest.mark.slow
def test_another_batch_size_traces_anew_and_keeps_it(two, other, saved):
    """Seven rows are another graph."""
    other.load_weights(saved.weights_file)
    kept = other.optimizer._tfscale_memory.whole("residual", "0")
    train(other, batch_size=7)
    train(other)
    assert other.optimizer._tfscale_memory.whole("residual", "0") is kept
    assert np.abs(kept.numpy() - saved.residuals["0"]).max() > 0


@pytest.mark.slow
def test_buckets_of_another_size_restore_it(kind, saved):
    """Residuals belong to variables: here each has a bucket of its own."""
    model = build(by(kind, bucket_bytes=1), seed=2)
    model.load_weights(saved.weights_file)
    assert_same(residuals(model), saved.residuals)
    train(model)
    model.load_weights(saved.weights_file)
    assert_same(residuals(model), saved.residuals)


@pytest.mark.slow
def test_another_rank_begins_anew(saved, kind, caplog):
    """Whether the model has been traced or not, and goes on."""
    if kind == "int4":
        pytest.skip("has no rank")
    for trained in (False, True):
        model = build(on(2, None, method={**METHODS, "first": PowerSGD(1)}), seed=2)
        if trained:
            train(model)
        model.load_weights(saved.weights_file)
        assert_same(residuals(model), saved.residuals)
        train(model)
        model.save_weights(saved.weights_file.with_name("other.weights.h5"))
        model.load_weights(saved.weights_file.with_name("other.weights.h5"))
    assert "'factor 0' has another shape" in caplog.text


def test_without_it_the_training_is_another(other, saved):
    """A residual is a part of the next gradient; the seeds are still restored."""
    other.load_weights(saved.weights_file)
    for variable in other.optimizer._tfscale_memory.named("residual").values():
        variable.assign(tf.zeros_like(variable.numpy()))
    train(other)
    assert bits(other) != saved.bits_later


def saved_of_memory(model, path):
    model.save_weights(path)
    with h5py.File(path) as file:
        group = file["optimizer"].get("_tfscale_memory/vars", {})
        index = json.loads(bytes(group["slots"][()]))
        assert group.keys() == {"slots", *(slot["entry"] for slot in index)}
        return sorted(f"{slot['name']} {slot['owner']}" for slot in index)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("wire", "arguments", "expected"),
    [
        ("fp32", {}, []),
        ("int4", {"error_feedback": False}, []),
        ("int8", {"error_feedback": True}, ["residual 0", "residual 2"]),
        ("ternary", {}, ["residual 0", "residual 2"]),
        (
            {"(first|second)/kernel$": "ternary"},
            {"error_feedback": False},
            ["rounding_seed optimizer"],
        ),
        (None, {"method": {"first": RandomK(0.5, False)}}, ["rounding_seed optimizer"]),
        (
            None,
            {"method": METHODS},
            [
                "factor 0",
                "residual 0",
                "residual 2",
                "residual 4",
                "rounding_seed optimizer",
                "velocity 2",
            ],
        ),
    ],
)
def test_only_what_a_method_needs_is_saved(tmp_path, wire, arguments, expected):
    model = build(on(2, wire, **arguments))
    train(model)
    found = saved_of_memory(model, tmp_path / "saved.weights.h5")
    assert found == sorted(["0 layer seed", *expected])


def stored(model):
    store = {}
    model.optimizer._tfscale_memory.save_own_variables(store)
    return store


def test_slots_that_a_file_does_not_hold_begin_anew(other, saved):
    train(other)
    other.load_weights(saved.weights_file)
    other.optimizer._tfscale_memory.load_own_variables({})
    assert not any(np.any(rows) for rows in residuals(other).values())


@dataclasses.dataclass(frozen=True)
class KeepsCommon(Method):
    """A user's method, whose state has a name that says where other state lives."""

    def state(self, gradient):
        return {"common": Kept(gradient.shape), "shared": Kept((), common=True)}

    def sums(self, load):
        load.keep("common", [load.rank + rest + 1 for rest in load.kept("common")])
        load.keep("shared", [rest + 1 for rest in load.kept("shared")])
        return [load.all_reduce(g, what=str(i)) for i, g in enumerate(load.gradients)]


@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_state_may_have_any_name(tmp_path, trained):
    """A file gives state named "common" back to each replica."""
    model, file = build(on(2, None, method=KeepsCommon())), tmp_path / "saved.weights.h5"
    train(model)
    kept = model.optimizer._tfscale_memory.whole("common", "0").numpy()
    assert [np.unique(rows).tolist() for rows in kept] == [[3], [6]]  # after three steps
    model.save_weights(file)
    again = build(on(2, None, method=KeepsCommon()), seed=2)
    if trained:
        train(again, 2)
    again.load_weights(file)
    train(again)
    state = again.optimizer._tfscale_memory
    np.testing.assert_array_equal(state.whole("common", "0").numpy(), 2 * kept)
    assert float(state.whole("shared", "0").numpy()) == 6


@pytest.mark.slow
def test_a_slot_with_a_variable_keeps_its_shape():
    model = build(on(2))
    train(model)
    state = model.optimizer._tfscale_memory
    (slot, *_) = [kept.slot for kept in state.named("residual").values()]
    state.declare([slot])
    with pytest.raises(ValueError, match=r"has a variable of the shape .* declared with .*\(3,\)"):
        state.declare([dataclasses.replace(slot, shape=(3,))])
    assert state.has([slot])
