"""Weights and channels that become zero while a model trains, and channels that leave it."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.quantize.small_models import (
    CLASSES,
    compiled,
    downsampling,
    images,
    plain,
    residual,
    settled,
)
from tests.strategy.twins import check_twins, two
from tfscale import quantize, sync


def train(model, prune, epochs=1, rows=64, **how):
    x, y = images(rows)
    callbacks = [prune] if prune else []
    settings = {"batch_size": 16, "shuffle": False, "verbose": 0, "callbacks": callbacks, **how}
    return model.fit(x, y, epochs=epochs, **settings)


def zeros(model):
    kernels = [each for each in model.trainable_weights if len(each.shape) > 1]
    return [float((np.asarray(each) == 0).mean()) for each in kernels]


# ---------------------------------------------------------------------- single weights


def test_the_share_of_zeros_follows_the_schedule():
    prune = quantize.Prune(0.8, begin=2, end=12, every=1)
    shares = [prune.sparsity_at(step) for step in range(20)]
    assert shares[:3] == [0, 0, 0] and shares[12:] == [0.8] * 8
    assert np.all(np.diff(shares[2:13]) > 0) and np.all(np.diff(shares[2:13], 2) < 0)


class Zeros(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(zeros(self.model)[0])


def test_weights_stay_zero_between_masks():
    model, seen = compiled(plain()), Zeros()
    prune = quantize.Prune(0.6, begin=2, end=6, every=2)
    train(model, None, callbacks=[prune, seen], epochs=2)
    expected = [prune.sparsity_at(step) for step in (0, 2, 2, 4, 4, 6, 6, 6)]
    np.testing.assert_allclose(seen.seen, expected, atol=1e-4)
    train(model, None)  # masks stay on the model
    np.testing.assert_allclose(zeros(model), [0.6] * 3, atol=0.01)


def test_the_smallest_weights_leave():
    model = compiled(settled(plain), keras.optimizers.SGD(0.0))
    before = np.abs(np.asarray(model.layers[1].kernel))
    train(model, quantize.Prune(0.5, end=1, every=1))
    gone = np.asarray(model.layers[1].kernel) == 0
    assert before[gone].max() <= before[~gone].min()


def test_weights_of_least_given_importance_leave():
    model = compiled(settled(plain), keras.optimizers.SGD(0.0))
    kernel = model.layers[-1].kernel
    importance = np.where(np.arange(CLASSES) < 2, 1e6, 1e-6) * np.ones(kernel.shape)
    train(model, quantize.Prune(0.5, end=1, every=1, by={kernel.path: importance}))
    assert [float((each == 0).mean()) for each in np.asarray(kernel).T] == [0, 0, 1, 1]
    assert zeros(model)[:2] == [0, 0]


def test_a_pattern_chooses_kernels():
    model = compiled(plain())
    train(model, quantize.Prune(0.5, end=1, every=1, kernels="second"))
    assert [share > 0.4 for share in zeros(model)] == [False, True, False]


def test_a_model_that_has_been_trained_before_is_pruned():
    model = compiled(plain())
    train(model, None)
    train(model, quantize.Prune(0.5, end=5, every=1), epochs=2)
    np.testing.assert_allclose(zeros(model), [0.5] * 3, atol=0.01)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("channels", [False, True])
def test_a_resumed_training_is_that_of_one_run(channels, tmp_path):
    def prune():
        return quantize.Prune(0.5, end=10, every=3, channels=channels)

    whole = compiled(settled(plain))
    train(whole, prune(), epochs=3)
    first = compiled(settled(plain))
    train(first, prune(), epochs=1)
    first.save(tmp_path / "first.keras")
    second = keras.models.load_model(tmp_path / "first.keras")
    train(second, prune(), epochs=3, initial_epoch=1)
    for one, other in zip(whole.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, 1e-5, 1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("channels", [False, True])
def test_replicas_prune_as_one_device(channels):
    def build():
        return compiled(plain(), keras.optimizers.SGD(0.05, momentum=0.9))

    def run(model):
        history = train(model, quantize.Prune(0.5, end=5, every=2, channels=channels), 2, 40)
        return {**history.history, "zeros": zeros(model)}

    assert max(check_twins(build, run)["zeros"]) > 0.4


@pytest.mark.parametrize("averages", [False, True])
def test_a_model_without_shapes_is_pruned(averages):
    x = np.random.default_rng(0).standard_normal((32, 8)).astype("float32")
    net = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    net.compile(keras.optimizers.Adam(0.01, use_ema=averages), "mse")
    net.fit(x, x[:, :1], epochs=4, verbose=0, callbacks=[quantize.Prune(0.5, end=4, every=1)])
    assert [float((each.kernel.numpy() == 0).mean()) for each in net.layers] == [0.5, 0.5]


def test_channels_of_a_frozen_layer_stay():
    x = np.random.default_rng(0).standard_normal((32, 8)).astype("float32")
    net = keras.Sequential([keras.Input([8]), *(keras.layers.Dense(n) for n in (16, 16, 1))])
    net.layers[0].trainable = False
    net.compile("sgd", "mse")
    prune = quantize.Prune(0.5, end=4, every=1, channels=True)
    net.fit(x, x[:, :1], epochs=4, verbose=0, callbacks=[prune])
    assert [int((each.kernel.numpy() == 0).all(0).sum()) for each in net.layers] == [0, 8, 0]


def test_rules_that_let_weights_differ_are_refused():
    with two(sync=sync.LocalSGD()).scope():
        model = compiled(plain(), keras.optimizers.SGD(0.05))
    with pytest.raises(ValueError, match="lets them differ for some steps"):
        train(model, quantize.Prune(0.5, end=5))


@pytest.mark.slow
def test_steps_per_execution_keep_zeros():
    model = plain()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, steps_per_execution=2, jit_compile=False)
    train(model, quantize.Prune(0.5, end=4, every=1), epochs=3)
    np.testing.assert_allclose(zeros(model), [0.5] * 3, atol=0.01)


# ---------------------------------------------------------------------- channels


def transposed():
    """Layers of which shrink knows how channels go through, and an LSTM of which it does not."""
    first = keras.Input([12, 12, 3])
    x = layers.SeparableConv2D(8, 3, depth_multiplier=2, activation="relu", name="a")(first)
    y = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=1, name="b")(x)
    x = layers.Concatenate()([x, layers.Multiply()([x, y])])
    x = layers.Conv2DTranspose(6, 2, strides=2, activation="tanh", name="c")(x)
    x = layers.MaxPooling2D(4)(x)
    x = layers.Reshape([25, 6])(x)
    x = layers.Dense(8, "relu", name="d")(layers.LSTM(5)(x))
    return keras.Model(first, layers.Dense(CLASSES, name="head")(x))


class Own(keras.Model):
    """A model of a class of its own."""


def own():
    made = downsampling()
    return Own(made.inputs, made.outputs)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("build", [plain, residual, downsampling, transposed, own])
def test_the_smaller_model_gives_the_answers_of_the_masked_one(build, tmp_path):
    model = compiled(settled(build))
    train(model, quantize.Prune(0.5, end=3, every=1, channels=True), rows=48)
    small = quantize.shrink(model)
    assert type(small) is type(model) and small.compiled
    x, _ = images(64, seed=3)
    expected, found = (np.asarray(each(x, training=False)) for each in (model, small))
    np.testing.assert_allclose(found, expected, 0, 1e-6 * max(1, np.abs(expected).max()))
    assert small.count_params() < (0.75 if build is transposed else 0.6) * model.count_params()
    for each in (model, small):
        each.save(tmp_path / f"{each.count_params()}.keras")
    sizes = [(tmp_path / f"{each.count_params()}.keras").stat().st_size for each in (small, model)]
    assert sizes[0] < sizes[1]


@pytest.mark.slow
def test_layers_of_one_sum_lose_the_same_channels():
    model = compiled(settled(downsampling))
    train(model, quantize.Prune(0.5, end=3, every=1, channels=True))
    small = quantize.shrink(model)
    filters = {each.name: each.filters for each in small.layers if hasattr(each, "filters")}
    assert filters == {"stem": 3, "a0": 3, "b0": 3, "a1": 6, "b1": 6, "down1": 6}
    small.fit(*images(32), verbose=0)


def test_a_channel_of_a_sum_stays_if_one_of_its_layers_has_it():
    model = settled(downsampling)
    for name, attribute in [("stem", "kernel"), ("stem", "bias")]:
        weight = getattr(model.get_layer(name), attribute)
        weight.assign(np.asarray(weight) * (np.arange(6) > 1))
    small = quantize.shrink(model)
    assert small.get_layer("stem").filters == 6
    x, _ = images(8)
    np.testing.assert_allclose(small(x), model(x), 1e-5, 1e-6)


def test_a_channel_that_batch_norm_shifts_stays():
    model = settled(plain)
    kernel = model.get_layer("first").kernel
    kernel.assign(np.asarray(kernel) * (np.arange(32) > 3))
    assert quantize.shrink(model).get_layer("first").units == 32
    norm = model.layers[2]
    for weight in (norm.gamma, norm.beta):
        weight.assign(np.asarray(weight) * (np.arange(32) > 3))
    assert quantize.shrink(model).get_layer("first").units == 28


def test_one_channel_stays():
    model = settled(plain)
    second = model.get_layer("second")
    second.kernel.assign(0 * second.kernel)
    second.bias.assign(0 * second.bias)
    small = quantize.shrink(model)
    assert small.get_layer("second").units == 1
    x, _ = images(4)
    np.testing.assert_allclose(small(x), model(x), 1e-6)


@pytest.mark.slow
def test_a_shrunk_model_is_quantized():
    model = compiled(settled(downsampling))
    train(model, quantize.Prune(0.5, end=3, every=1, channels=True))
    small = quantize.shrink(model)
    x, _ = images(32)
    few = quantize.apply(small, {"stem": 4, "head": 8}, x)
    assert few.get_layer("stem").filters == 3


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"sparsity": 1.0}, "sparsity is a share, more than 0 and less than 1"),
        ({"end": 2, "begin": 2}, "end is a step after begin=2; got 2"),
        ({"by": 3}, "by is a dict from kernels' paths"),
        ({"kernels": "*"}, "kernels is a regular expression"),
    ],
)
def test_errors_say_what_was_expected(settings, words):
    with pytest.raises(ValueError, match=words):
        quantize.Prune(**{"sparsity": 0.5, "end": 4, **settings})


def test_models_inside_models_say_that_channels_stay():
    inner = keras.Sequential([keras.Input([8]), keras.layers.Dense(8)])
    model = keras.Sequential([keras.Input([8]), inner, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="no layer whose channels can be pruned.*channels=False"):
        model.fit(
            np.ones((4, 8)), np.ones((4, 1)), verbose=0,
            callbacks=[quantize.Prune(0.5, end=4, channels=True)],
        )  # fmt: skip


def test_kernels_that_are_not_there_are_an_error():
    with pytest.raises(
        ValueError, match="no kernel that can be pruned, whose path kernels='conv' matches"
    ):
        train(compiled(plain()), quantize.Prune(0.5, end=4, kernels="conv"))
    model = compiled(plain())
    path = model.layers[1].kernel.path
    with pytest.raises(ValueError, match=r"shape of by\[.*\] is \(432, 32\); got \(3,\)"):
        train(model, quantize.Prune(0.5, end=4, by={path: np.ones(3)}))


def joined():
    """Two groups of filters, whose concatenation one batch norm shifts."""
    inputs = keras.Input([12, 12, 3])
    x = layers.Concatenate()([layers.Conv2D(8, 3, name=name)(inputs) for name in "ab"])
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, name="c")(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def test_a_batch_norm_of_two_groups_is_masked_for_each():
    model = compiled(settled(joined))
    train(model, quantize.Prune(0.5, end=3, every=1, channels=True))
    small = quantize.shrink(model)
    assert [small.get_layer(name).filters for name in "abc"] == [4, 4, 4]
    x, _ = images(8)
    np.testing.assert_allclose(small(x), model(x), 1e-5, 1e-6)


def test_a_layer_that_keeps_some_channels_keeps_all_and_so_do_those_added_to_it():
    inputs = keras.Input([12, 12, 3])
    a, b = (layers.Conv2D(4, 3, name=name)(inputs) for name in "ab")
    c = layers.Conv2D(8, 3, name="c")(inputs)
    x = layers.Add()([layers.Concatenate()([a, b]), c])
    x = layers.Conv2D(6, 1, name="d")(x)
    outputs = [layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)), b]
    model = keras.Model(inputs, outputs)  # an output keeps the channels of b, and so of c and a
    model.compile("sgd", ["sparse_categorical_crossentropy", None])
    x, y = images(32)
    prune = quantize.Prune(0.5, end=2, every=1, channels=True)
    model.fit(x, (y, np.zeros((32, 10, 10, 4))), 16, verbose=0, callbacks=[prune])
    small = quantize.shrink(model)
    assert [small.get_layer(name).filters for name in "abcd"] == [4, 4, 8, 3]
    assert np.count_nonzero(model.get_layer("a").kernel) == 3 * 3 * 3 * 4


def channels_first():
    inputs = keras.Input([3, 16, 16])
    x = layers.Conv2D(8, 3, data_format="channels_first")(inputs)
    x = layers.GlobalAveragePooling2D(data_format="channels_first")(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(6, "relu", name="pruned")(x)))


def another_axis():
    x = inputs = keras.Input([20, 6])
    x = layers.Dense(6, "relu", name="pruned")(layers.BatchNormalization(axis=1)(x))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def dicts():
    """Inputs that are not in the order of their names, and a model that returns a dict."""
    z, a = keras.Input([4], name="z"), keras.Input([8], name="a")
    h = keras.Input([6])
    inner = keras.Model(h, {"h": layers.Dense(6)(h), "g": layers.Dense(3)(h)})
    x = layers.Add()([layers.Dense(6, "relu")(z), layers.Dense(6, "relu")(a)])
    x = layers.Dense(6, "relu", name="pruned")(inner(x)["h"])
    return keras.Model({"z": z, "a": a}, layers.Dense(2)(x))


def many():
    inputs = keras.Input([20])
    parts = keras.ops.split(inputs, 10, axis=-1)
    x = layers.Concatenate()([layers.Dense(4, "relu")(each) for each in parts])
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(6, "relu", name="pruned")(x)))


@pytest.mark.parametrize("build", [channels_first, another_axis, dicts, many])
def test_what_shrink_does_not_know_keeps_its_channels(build):
    model = build()
    pruned = model.get_layer("pruned")
    pruned.kernel.assign(np.asarray(pruned.kernel) * (np.arange(6) > 1))
    small = quantize.shrink(model)
    assert small.get_layer("pruned").units == 4
    if build is not channels_first:  # TensorFlow has no such convolution on CPUs
        draw = np.random.default_rng(0)
        x = keras.tree.map_structure(lambda s: draw.random((3, *s.shape[1:])), model.input)
        np.testing.assert_allclose(small(x), model(x), 1e-5, 1e-6)
