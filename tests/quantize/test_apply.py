"""Models that compute with few bits: what they answer, how they train, and their files."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests import warm
from tests.quantize.nets import data, mixed
from tests.quantize.small_models import (
    CLASSES,
    NETS,
    compiled,
    images,
    kernels,
    plain,
    residual,
    settled,
    transformer,
    tuned,
    words,
)
from tests.strategy.twins import check_twins
from tfscale import quantize
from tfscale.analysis.quantize.apply import kernels_of, leaves
from tfscale.analysis.quantize.kernels import layer_path


@pytest.fixture(scope="module")
def model():
    return compiled(settled(residual))


def answers(model, x):
    return np.asarray(model(x, training=False))


# ---------------------------------------------------------------------- what they answer


def test_eight_bits_answer_as_float_does(model):
    x, _ = images()
    expected = answers(model, x)
    for samples in (None, x):
        small = quantize.apply(model, kernels(model, 8), samples)
        assert np.abs(answers(small, x) - expected).max() < 0.05 * np.abs(expected).max()
    two = answers(quantize.apply(model, kernels(model, 2), x), x)
    assert np.abs(two - expected).max() > 0.05 * np.abs(expected).max()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("group, ranges", [(None, "mse"), (2, "minmax")])
def test_kernels_have_the_errors_that_the_plan_counts(group, ranges):
    model, (x, y) = mixed(), data()
    study = quantize.sensitivity(
        model, x, y, by="error", bits=[3, 4], group=group, ranges=ranges, trained=True,
        batch_size=40,
    )  # fmt: skip
    plan = quantize.plan(study, size="10%")
    small = quantize.apply(model, plan, fold=False)
    errors = dict.fromkeys(plan.bits, 0.0)
    for layer in leaves(small):
        for quantizer, kernel in kernels_of(layer):
            value = tf.convert_to_tensor(kernel)
            errors[layer_path(kernel)] += float(tf.reduce_sum((quantizer.fake(value) - value) ** 2))
    expected = {path: study[path].errors[bits] for path, bits in plan.bits.items()}
    assert errors == pytest.approx(expected, rel=1e-4)


def test_layers_keep_names_and_batch_norm_leaves(model):
    small = quantize.apply(model, kernels(model, 4))
    expected = [each.name for each in model.layers[1:] if "norm" not in each.name]
    assert [each.name for each in small.layers[1:]] == expected
    kept = quantize.apply(model, kernels(model, 4), fold=False)
    assert [each.name for each in kept.layers[1:]] == [each.name for each in model.layers[1:]]


def test_folded_batch_norm_changes_no_answer(model):
    x, _ = images()
    wide = quantize.apply(model, kernels(model, 15))
    np.testing.assert_allclose(answers(wide, x), answers(model, x), 0, 5e-3)


def test_batch_norm_after_a_layer_with_two_users_stays():
    first = keras.Input([4])
    x = layers.Dense(3, name="shared")(first)
    model = keras.Model(first, layers.Add()([x, layers.BatchNormalization(name="norm")(x)]))
    small = quantize.apply(model, {"shared": 8})
    assert small.get_layer("norm").built


def test_weights_have_the_values_of_their_bits(model):
    small = quantize.apply(model, kernels(model, 3))
    head = small.get_layer("head")
    rounded = np.asarray(head.kernel_quantizers[0].fake(tf.convert_to_tensor(head.kernel)))
    assert all(len(np.unique(channel)) <= 7 for channel in rounded.T)
    x = np.eye(6, dtype="float32")
    np.testing.assert_allclose(head(x), rounded + np.asarray(head.bias), 1e-6)


def volumes():
    first = keras.Input([4, 4, 4, 2])
    x = layers.Conv3D(3, 2, activation="relu", name="volume")(first)
    x = layers.Reshape([9, 3, 3])(x)
    x = layers.Conv2DTranspose(4, 2, strides=2, padding="same", name="transposed")(x)
    x = layers.Reshape([27, 16])(x)
    x = layers.Conv1DTranspose(4, 3, name="transposed_1d")(x)
    x = layers.DepthwiseConv1D(3, name="depthwise")(x)
    return keras.Model(first, layers.Dense(CLASSES, name="head")(layers.Flatten()(x)))


def cubes(rows=96):
    dice = np.random.default_rng(0)
    return dice.standard_normal((rows, 4, 4, 4, 2)).astype("float32"), np.arange(rows) % CLASSES


OTHERS = {"transformer": (transformer, words), "volumes": (volumes, cubes)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_train_and_are_saved(name, tmp_path):
    build, data = OTHERS[name]
    keras.utils.set_random_seed(1)
    model, (x, y) = build(), data()
    plan = kernels(model, 8)
    small = quantize.apply(model, plan, x)
    expected = answers(model, x)
    assert 0 < np.abs(answers(small, x) - expected).max() < 0.1 * np.abs(expected).max()
    compiled(small)
    before = [np.asarray(weight) for weight in small.trainable_weights]
    small.fit(x, y, verbose=0)
    moved = [np.any(np.asarray(w) != b) for w, b in zip(small.trainable_weights, before)]
    assert all(moved)
    small.save(tmp_path / "small.keras")
    loaded = keras.models.load_model(tmp_path / "small.keras")
    np.testing.assert_array_equal(answers(loaded, x), answers(small, x))


def test_parts_of_attention_have_bits_of_their_own():
    model, (x, _) = transformer(), words()
    small = quantize.apply(model, {"mha/query": 2, "mha/attention_output": 4}, x)
    assert [each.bits for each in small.get_layer("mha").kernel_quantizers] == [2, 4]
    assert type(small.get_layer("words")) is layers.Embedding


def test_seeds_of_dropout_advance():
    model, (x, _) = transformer(), words()
    small = quantize.apply(model, {"mha": 4})
    assert np.any(small(x, training=True) != small(x, training=True))


def test_models_inside_models_are_quantized(model):
    inner = keras.Sequential([keras.Input([6]), layers.Dense(5, name="inner")])
    first = keras.Input([6])
    outer = keras.Model(first, layers.Dense(2, name="outer")(inner(first)))
    small = quantize.apply(outer, {"inner": 2, "outer": 2})
    (nested,) = (each for each in small.layers if isinstance(each, keras.Sequential))
    assert nested.layers[0].kernel_quantizers[0].bits == 2


# ---------------------------------------------------------------------- training


@pytest.mark.slow
def test_training_wins_back_what_rounding_lost(model):
    x, y = images()
    small = quantize.apply(model, kernels(model, 3), x, ranges="minmax")
    before = small.evaluate(x, y, verbose=0)
    small.fit(x, y, epochs=4, batch_size=32, verbose=0)
    assert small.evaluate(x, y, verbose=0) < before


@pytest.mark.slow
def test_learned_scales_are_trained(model):
    x, y = images()
    small = quantize.apply(model, kernels(model, 4), x, ranges="learned")
    scales = [each for each in small.trainable_weights if each.path.endswith("/scale")]
    assert len(scales) == 12  # five layers, one of them with two kernels: weights and inputs
    before = [np.asarray(each) for each in scales]
    small.fit(x, y, verbose=0)
    assert all(np.any(np.asarray(s) != b) for s, b in zip(scales, before, strict=True))


class OwnStep(keras.Model):
    """A model with a training step of its own."""

    def train_step(self, data):
        return {**super().train_step(data), "own": tf.constant(1.0)}


def test_own_training_steps_are_kept():
    first = keras.Input([4])
    model = OwnStep(first, layers.Dense(2, name="head")(first))
    model.compile("sgd", "mse")
    small = quantize.apply(model, {"head": 4})
    assert type(small) is OwnStep
    x = np.ones((8, 4), "float32")
    assert small.fit(x, x[:, :2], verbose=0).history["own"] == [1.0]


def test_a_model_whose_copy_would_lose_its_step_is_refused():
    class Own(keras.Model):
        def __init__(self, width):
            first = keras.Input([4])
            super().__init__(first, layers.Dense(width, name="own")(first))

    with pytest.raises(ValueError, match="Own, whose constructor|Own has a constructor"):
        quantize.apply(Own(2), {"own": 4})


@pytest.mark.parametrize(
    "build, ranges",
    [(plain, "learned"), pytest.param(residual, "mse", marks=pytest.mark.full)],
)
def test_replicas_train_as_one_device(build, ranges):
    x, y = images(40)

    def small():
        model = build()
        made = quantize.apply(model, kernels(model, 4), x, ranges=ranges)
        return compiled(made, keras.optimizers.SGD(0.05, momentum=0.9))

    def train(model):
        # Answers are not compared: a weight that is off by 1e-8 may be rounded the other way.
        return model.fit(x, y, batch_size=16, epochs=8, shuffle=False, verbose=0).history

    check_twins(small, train)


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    "name",
    ["plain-learned", *(pytest.param(f"residual-{how}", marks=pytest.mark.full)
                        for how in ("learned", "mse"))],
)  # fmt: skip
def test_workers_train_as_one_device_and_their_integers_say_the_same(name):
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [str(Path(__file__).parent / "workers" / "quantized.py"), name]
    with warm.Workers(command, 2, environment={"PYTHONPATH": path}) as group:
        told = [text[text.index("TOLD") :].split()[:4] for text in group.wait(300)]
    assert told[0] == told[1]
    _, _, equal, numbers = told[0]
    weights, _ = tuned(*name.split("-"))
    found = np.frombuffer(bytes.fromhex(numbers), weights.dtype)
    np.testing.assert_allclose(found, weights, 0, 1e-6)
    assert equal == "True"


class OwnLoop(keras.Model):
    """A model whose training step is written out, as in Keras's guides."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


@pytest.mark.slow
def test_replicas_train_a_dict_of_outputs_by_an_own_step():
    x, y = images(32)

    def small():
        first = keras.Input(x.shape[1:])
        h = layers.Flatten()(layers.Conv2D(4, 3, activation="relu", name="conv")(first))
        outputs = {
            "kind": layers.Dense(10, name="kind")(h),
            "mean": layers.Dense(1, name="mean")(h),
        }
        made = quantize.apply(OwnLoop(first, outputs), {"conv": 4, "kind": 4, "mean": 8}, x)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.SGD(0.05), {"kind": loss, "mean": "mse"})
        return made

    def train(model):
        targets = {"kind": y, "mean": x.mean((1, 2, 3))[:, None]}
        model.fit(x, targets, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return {}  # a step of its own returns its replica's loss

    check_twins(small, train)


def test_half_precision_trains():
    x, y = images(32)
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        model = plain()
        small = compiled(quantize.apply(model, kernels(model, 8), x))
        assert np.isfinite(small.fit(x, y, verbose=0).history["loss"][0])
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


# ---------------------------------------------------------------------- files


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NETS)
def test_a_saved_model_gives_the_same_answers(name, tmp_path):
    model, (x, _) = settled(NETS[name]), images(32)
    small = quantize.apply(model, kernels(model, 4), x, ranges="learned")
    small.save(tmp_path / "small.keras")
    loaded = keras.models.load_model(tmp_path / "small.keras")
    np.testing.assert_array_equal(answers(loaded, x), answers(small, x))


@pytest.mark.slow
def test_a_saved_model_trains_on_as_if_it_had_not_been_saved(tmp_path):
    model, (x, y) = settled(plain), images(32)
    small = compiled(quantize.apply(model, kernels(model, 4), x, ranges="learned"))
    small.fit(x, y, verbose=0)
    small.save(tmp_path / "small.keras")
    loaded = keras.models.load_model(tmp_path / "small.keras")
    small.fit(x, y, verbose=0, shuffle=False)
    loaded.fit(x, y, verbose=0, shuffle=False)
    np.testing.assert_allclose(answers(loaded, x), answers(small, x), 1e-4, 1e-5)


def test_a_saved_graph_gives_the_same_answers(model, tmp_path):
    x, _ = images(32)
    small = quantize.apply(model, kernels(model, 4), x)
    small.export(tmp_path / "small", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "small")
    np.testing.assert_array_equal(loaded.serve(x), answers(small, x))


# ---------------------------------------------------------------------- errors


class Called(keras.Model):
    def call(self, x):
        return x


def recurrent():
    return keras.Sequential([keras.Input([3, 2]), layers.LSTM(4, name="lstm")])


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"plan": {}}, "plan is a plan, or a dict"),
        ({"plan": 4}, "plan is a plan, or a dict"),
        ({"plan": {"hed": 4}}, "no layer of that path.*Did you mean 'head'"),
        ({"plan": {"head": 1}}, r"plan\['head'\] is a number of bits"),
        ({"ranges": "max"}, "ranges is 'minmax'"),
        ({"group": 0}, "group is 'kernel' or a number of channels"),
        ({"activations": 9}, "activations is a number of bits"),
        ({"model": Called()}, "defines its own call"),
        ({"model": keras.Sequential([layers.Dense(2)])}, "has no weights yet"),
    ],
)
def test_errors_say_what_was_expected(settings, words):
    given = {"model": residual(), "plan": {"head": 4}, **settings}
    with pytest.raises(ValueError, match=words):
        quantize.apply(**given)


def test_layers_that_nobody_knows_stay_in_float(caplog):
    quantize.apply(recurrent(), {"lstm": 4})
    assert "lstm' (LSTM) are of kinds that quantize does not know" in caplog.text
    with pytest.raises(ValueError, match="lstm' .LSTM. are of kinds"):
        quantize.apply(recurrent(), {"lstm": 4}, strict=True)


@pytest.mark.parametrize("form", ["sequential", "functional"])
def test_functions_of_lambda_layers_are_those_of_the_model(form):
    first = keras.Input([3])
    chain = [layers.Dense(4, name="own"), layers.Lambda(lambda x: x * 2.0), layers.Dense(2)]
    model = keras.Sequential([first, *chain])
    if form == "functional":
        model = keras.Model(first, chain[2](chain[1](chain[0](first)) + 1.0))
    x = np.random.default_rng(0).standard_normal((8, 3)).astype("float32")
    small = quantize.apply(model, {"own": 16})
    np.testing.assert_allclose(answers(small, x), answers(model, x), rtol=1e-6)
    np.testing.assert_allclose(answers(quantize.shrink(model), x), answers(model, x), rtol=1e-6)


class OwnLayer(layers.Layer):
    """A layer that holds others, as in Keras's examples of transformers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = keras.Sequential([layers.Dense(4, name="first"), layers.Dense(2)])

    def call(self, x):
        return x + self.inner(x)


def test_layers_within_others_stay_in_float(caplog):
    first = keras.Input([3, 2])
    x = layers.TimeDistributed(layers.Dense(2, name="each"), name="steps")(first)
    x = OwnLayer(name="own")(x)
    model = keras.Model(first, layers.Dense(1, name="head")(x))
    compiled(model)
    x = np.random.default_rng(0).standard_normal((8, 3, 2)).astype("float32")
    study = quantize.sensitivity(
        model, x, x[..., :1], by="error", bits=[4], trained=True, loss="mse"
    )
    plan = quantize.plan(study, size="100%")
    small = quantize.apply(model, plan, x)
    for told in ("'steps/each' (in 'steps', a TimeDistributed)", "(in 'own', a OwnLayer)"):
        assert told in caplog.text
    assert "pinned={path: 32}" in caplog.text and len(kernels_of(small.get_layer("head"))) == 1
    assert np.all(np.isfinite(answers(small, x)))
    with pytest.raises(ValueError, match="are within other layers.*leave out strict=True"):
        quantize.apply(model, plan, strict=True)


class OwnLoss(keras.losses.Loss):
    def call(self, y, p):
        return keras.ops.mean(keras.ops.abs(y - p), -1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("own", [lambda: own_loss, OwnLoss], ids=["function", "class"])
@pytest.mark.parametrize("form", ["sequential", "functional"])
def test_a_copy_has_the_loss_and_metrics_of_a_script_that_registers_nothing(own, form):
    chain = keras.Sequential([keras.Input([6]), layers.Dense(4, "tanh"), layers.Dense(2)])
    net = chain if form == "sequential" else keras.Model(chain.inputs, chain.outputs)
    net.compile("sgd", own(), metrics=[own_loss])
    x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
    expected = net.evaluate(x, x[:, :2], verbose=0)
    small = quantize.apply(net, kernels(net, 8))
    np.testing.assert_allclose(small.evaluate(x, x[:, :2], verbose=0), expected, rtol=0.05)
    small.fit(x, x[:, :2], verbose=0)
    assert quantize.shrink(net).compiled


def own_loss(y, p):
    return keras.ops.mean(keras.ops.log(1 + keras.ops.square(y - p)), -1)
