"""Models as strangers write them: preprocessing inside, masks, functions that no file can name."""

import gc
import importlib
import itertools
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfscale import quantize

KINDS = (layers.Dense, layers.Embedding, layers.MultiHeadAttention, layers.Conv3D)


def dice():
    return np.random.default_rng(0)


def plan_of(model, bits=8):
    return {each.name: bits for each in model.layers if isinstance(each, KINDS)}


def normalized():
    x = dice().normal(30, 7, (64, 8)).astype("float32")
    norm = layers.Normalization()
    norm.adapt(x)
    return keras.Sequential([keras.Input([8]), norm, layers.Dense(8, "relu"), layers.Dense(2)]), x


def text():
    x = tf.constant(["the cat sat", "a dog ran away", "cat dog"] * 6)
    words = layers.TextVectorization(output_sequence_length=5)
    words.adapt(x)
    first = keras.Input([], dtype="string")
    rows = layers.Embedding(20, 8)(words(first))
    return keras.Model(first, layers.Dense(2)(layers.Flatten()(rows))), x


def numbers_of_words():
    """Return integers, of which the last half is padding."""
    x = dice().integers(1, 20, (64, 6)).astype("int32")
    x[:, 3:] = 0
    return x


def masked_means():
    first = keras.Input([6], dtype="int32")
    rows = layers.Embedding(20, 8, mask_zero=True)(first)
    return keras.Model(first, layers.Dense(2)(layers.GlobalAveragePooling1D()(rows))), None


def masked_attention():
    first = keras.Input([6], dtype="int32")
    rows = layers.Embedding(20, 8, mask_zero=True)(first)
    rows = layers.MultiHeadAttention(2, 4)(rows, rows)
    return keras.Model(first, layers.Dense(2)(layers.GlobalAveragePooling1D()(rows))), None


def whole_inputs():
    first = keras.Input([6], dtype="int32")
    return keras.Model(first, layers.Dense(3)(layers.Dense(4, "relu")(first))), None


def volumes():
    x = dice().normal(size=(8, 6, 5, 5, 2)).astype("float32")
    shape = [keras.Input([6, 5, 5, 2]), layers.Conv3D(3, 2, activation="relu")]
    pool = layers.AveragePooling3D((2, 3, 2), (2, 1, 2), padding="same")
    return keras.Sequential([*shape, pool, layers.Flatten(), layers.Dense(2)]), x


def own_functions():
    def leaky(x):
        return keras.ops.maximum(x, 0.1 * x)

    first = layers.Dense(8, activation=leaky)
    second = layers.TimeDistributed(layers.Dense(8, activation=leaky))
    third = layers.Dense(4, activation=lambda x: keras.ops.minimum(x, 1))
    model = keras.Sequential([keras.Input([3, 6]), first, second, third, layers.Dense(2)])
    return model, dice().normal(size=(16, 3, 6)).astype("float32")


def a_bias_that_only_folding_makes():
    first = layers.Dense(8, use_bias=False, bias_initializer="ones")
    norm = layers.BatchNormalization()
    model = keras.Sequential([keras.Input([6]), first, norm, layers.Dense(2)])
    return model, dice().normal(size=(16, 6)).astype("float32")


MODELS = (
    normalized, text, masked_means, masked_attention, whole_inputs, volumes, own_functions,
    a_bias_that_only_folding_makes,
)  # fmt: skip


@pytest.mark.parametrize("build", MODELS, ids=lambda each: each.__name__)
def test_eight_bits_answer_as_float_does(build, tmp_path):
    keras.utils.set_random_seed(0)
    model, x = build()
    x = numbers_of_words() if x is None else x
    expected = np.asarray(model(x, training=False))
    small = quantize.apply(model, plan_of(model), x)
    found = np.asarray(small(x, training=False))
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    assert np.array_equal(small.predict(x, verbose=0), found)


@pytest.mark.parametrize("build", [normalized, text])
def test_copies_keep_what_preprocessing_has_learned(build):
    model, x = build()
    model.compile("sgd", "mse")
    expected = np.asarray(model(x))
    np.testing.assert_allclose(quantize.shrink(model)(x), expected, rtol=1e-6)
    study = quantize.sensitivity(
        model, x, np.zeros([len(x), 2]), by="error", bits=[8], trained=True
    )
    found = np.asarray(quantize.plan(study, (8,), size="100%").to_keras(model)(x))
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


def test_means_over_three_dimensions_are_those_of_integers():
    model, x = volumes()
    small = quantize.apply(model, plan_of(model), x)
    assert np.array_equal(quantize.integers(small).run(x), small.predict(x, verbose=0))


def test_scales_of_a_frozen_layer_are_not_trained():
    net = [keras.Input([6]), layers.Dense(8, "relu", name="base"), layers.Dense(2, name="head")]
    model = keras.Sequential(net)
    model.get_layer("base").trainable = False
    x = np.ones([4, 6], "float32")
    small = quantize.apply(model, {"base": 4, "head": 4}, x, ranges="learned")
    assert not small.get_layer("base").trainable_variables
    assert len(small.trainable_variables) == len(small.get_layer("head").trainable_variables) == 4


class Pairs(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return np.full([4, 6], i + 1.0, "float32"), np.zeros([4, 2])


def test_ranges_are_read_from_all_that_fit_reads():
    net = keras.Sequential([keras.Input([6]), layers.Dense(4, name="a"), layers.Dense(2, name="b")])
    x = np.repeat([1.0, 2.0], 4)[:, None] * np.ones([8, 6], "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x)).batch(4)
    plan = {"a": 8, "b": 8}
    expected = quantize.apply(net, plan, x).get_weights()
    for data in (Pairs(), (each for each in dataset), dataset):
        found = quantize.apply(net, plan, data).get_weights()
        assert all(np.array_equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x: x[:0], "x has no samples.*give some hundreds"),
        (lambda x: (x, x), "a batch of x has 2 arrays, and model 'net' takes 1.*without targets"),
        (lambda x: x * np.nan, "layer 'net/a' are NaN or infinite.*look for NaN"),
        (lambda x: tf.data.Dataset.from_tensors(x).repeat(), r"without an end.*x.take\(10\)"),
    ],
)
def test_samples_without_ranges_are_refused(change, words):
    net = keras.Sequential([keras.Input([6]), layers.Dense(2, name="a")], name="net")
    with pytest.raises(ValueError, match=words):
        quantize.apply(net, {"a": 8}, change(np.ones([4, 6], "float32")))


def test_a_layer_that_has_few_bits_already_is_refused(caplog):
    net = keras.Sequential(
        [keras.Input([6]), layers.Dense(2, name="a"), layers.Dropout(0.5, name="rest")]
    )
    small = quantize.apply(net, {each.name: 8 for each in net.layers}, strict=True)
    assert not caplog.text  # a dropout has nothing to round
    with pytest.raises(ValueError, match="has few bits already: give quantize.apply the float"):
        quantize.apply(small, {"a": 4})


class Shapeless(keras.layers.Layer):
    def call(self, x):
        return tf.convert_to_tensor(np.asarray(x))


def test_a_model_without_a_graph_says_why():
    net = keras.Sequential([keras.Input([6]), layers.Dense(2, name="a"), Shapeless()])
    with pytest.raises(ValueError, match="no graph.*compute_output_shape"):
        quantize.apply(net, {"a": 4})


def test_integers_take_and_return_the_dicts_of_the_model():
    first, other = keras.Input([6], name="z"), keras.Input([4], name="a")
    rows = layers.Concatenate()([layers.Dense(4, "relu")(first), layers.Dense(3)(other)])
    outputs = {name: layers.Dense(size, name=name)(rows) for name, size in (("v", 1), ("u", 2))}
    model = keras.Model({"z": first, "a": other}, outputs)
    x = {
        name: dice().normal(size=(8, size)).astype("float32") for name, size in (("a", 4), ("z", 6))
    }
    small = quantize.apply(model, plan_of(model, 4), x)
    program, expected = quantize.integers(small), small.predict(x, verbose=0)
    found = program.run(x)
    assert set(found) == {"u", "v"}
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    with pytest.raises(ValueError, match="x is a dict of arrays with the keys z, a; got"):
        program.run([x["a"], x["z"]])


class Decay(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


@pytest.mark.parametrize("form", ["sequential", "functional"])
def test_a_copy_is_compiled_with_a_loss_and_a_rate_that_have_no_names(form):
    net = keras.Sequential([keras.Input([6]), layers.Dense(4, "tanh"), layers.Dense(2)])
    net = net if form == "sequential" else keras.Model(net.inputs, net.outputs)
    own = lambda y, p: keras.ops.mean(keras.ops.square(y - p), -1)  # noqa: E731
    net.compile(keras.optimizers.SGD(Decay()), own, metrics=[own, "mae"])
    x = dice().normal(size=(16, 6)).astype("float32")
    expected = net.evaluate(x, x[:, :2], verbose=0)
    small = quantize.apply(net, plan_of(net))
    np.testing.assert_allclose(small.evaluate(x, x[:, :2], verbose=0), expected, rtol=0.05)
    assert type(small.optimizer.get_config()["learning_rate"]) is not float and net.compiled


class Chain(keras.Sequential):
    def __init__(self, units=4, **how):
        super().__init__([keras.Input([6]), layers.Dense(units, name="a")], **how)


def test_a_sequential_model_with_a_constructor_of_its_own_is_refused():
    with pytest.raises(ValueError, match="is a Chain.*Let its constructor take layers and name"):
        quantize.apply(Chain(), {"a": 4})


# ---- functions of one name, numbers in operations, layers that only look like others


def scaled(by):
    def loss(y, p):
        return by * keras.ops.mean((y - p) ** 2, -1)

    return loss


def two_heads(**compiled):
    inputs = keras.Input([8])
    hidden = layers.Dense(4, name="hidden")(inputs)
    model = keras.Model(inputs, [layers.Dense(1, name=name)(hidden) for name in "ab"])
    model.compile("sgd", **compiled)
    return model


def numbers(rows=64, columns=8):
    return dice().normal(size=(rows, columns)).astype("float32")


@pytest.mark.parametrize(
    "compiled",
    [
        lambda: {"loss": [scaled(1.0), scaled(100.0)]},
        lambda: {"loss": "mse", "metrics": [[scaled(1.0)], [scaled(100.0)]]},
        lambda: {
            "loss": "mse",
            "metrics": [[keras.metrics.MeanMetricWrapper(scaled(3.0))], ["mae"]],
        },
    ],
    ids=["losses", "metrics", "wrapped"],
)
def test_a_copy_has_each_function_where_the_model_has_it(compiled):
    model, x = two_heads(**compiled()), numbers()
    copy = quantize.apply(model, {"hidden": 15})
    expected, found = (
        one.evaluate(x, [x[:, :1], x[:, 1:2]], verbose=0, return_dict=True) for one in (model, copy)
    )
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_copy_for_keras_has_own_activations_and_lambdas():
    inputs = keras.Input([8])
    acts = [lambda x, by=by: by * x for by in (1.0, 50.0)]
    hidden = layers.Lambda(lambda x: 2 * x)(layers.Dense(4, acts[0], name="hidden")(inputs))
    model, x = keras.Model(inputs, layers.Dense(1, acts[1])(hidden)), numbers()
    model.compile(keras.optimizers.SGD(1e-9), "mse")
    model.fit(x, x[:, :1], verbose=0)
    study = quantize.sensitivity(model, x, x[:, :1], bits=(8,), samples=2)
    copy = quantize.plan(study, size="100%").to_keras(model)
    expected = model.predict(x, verbose=0)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(copy.predict(x, verbose=0), expected, atol=0.05 * largest)


def dead_channel(after):
    """Return a model whose first layer has a channel of zeros, before an operation."""
    inputs = keras.Input([8])
    first = layers.Dense(4, name="first")
    model = keras.Model(inputs, layers.Dense(2, name="last")(after(first(inputs))))
    kernel = first.kernel.numpy()
    kernel[:, 2] = 0
    first.kernel.assign(kernel)
    return model


@pytest.mark.parametrize(
    "after",
    [
        lambda x: x + 1.0,
        lambda x: x * 2.0,
        lambda x: layers.ReLU(negative_slope=0.5, threshold=1.0)(x),
    ],
    ids=["plus a number", "times a number", "bent relu"],
)
def test_a_channel_leaves_only_if_it_is_zero_where_it_is_read(after):
    model, x = dead_channel(after), numbers()
    smaller = quantize.shrink(model)
    np.testing.assert_allclose(
        smaller.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-5
    )


@pytest.mark.parametrize(
    "after",
    [lambda x: x + 1.0, lambda x: keras.ops.reshape(x, (-1, 4))],
    ids=["plus a number", "an operation without a layer"],
)
def test_integers_refuse_what_they_do_not_compute(after):
    copy = quantize.apply(dead_channel(after), {"first": 8, "last": 8}, numbers())
    with pytest.raises(ValueError, match="which integers do not compute"):
        quantize.integers(copy)


def test_integers_refuse_a_tanh_that_another_layer_reads():
    inputs = keras.Input([8])
    hidden = layers.Dense(4, "tanh", name="hidden")(inputs)
    model = keras.Model(inputs, [hidden, layers.Dense(2, name="last")(hidden)])
    copy = quantize.apply(model, {"hidden": 8, "last": 8}, numbers())
    with pytest.raises(ValueError, match="'hidden' is .*tanh"):
        quantize.integers(copy)


def test_attention_with_few_bits_adds_its_losses():
    inputs = keras.Input([5, 8])
    attention = layers.MultiHeadAttention(
        2, 4, name="attention", activity_regularizer=keras.regularizers.L2(0.1)
    )
    model = keras.Model(inputs, attention(inputs, inputs))
    copy = quantize.apply(model, {"attention": 15})
    x = numbers(3, 40).reshape(3, 5, 8)
    for one in (model, copy):
        one(x)
    expected, found = (sorted(float(loss) for loss in one.losses) for one in (model, copy))
    assert found == pytest.approx(expected, rel=0.01)
    assert len(found) == 4


class Block(layers.Layer):
    """A layer whose part has the name of a part of Keras's attention."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.query = layers.Dense(8, name="query")

    def build(self, shape):
        self.query.build(shape)

    def call(self, x):
        return self.query(x)


@pytest.mark.parametrize(
    "hidden",
    [
        lambda x: Block(name="block")(x),
        lambda x: layers.GroupQueryAttention(4, 4, 2, name="block")(x, x),
    ],
    ids=["own", "groups"],
)
def test_parts_of_other_layers_stay_in_float_and_are_told(hidden, caplog):
    inputs = keras.Input([5, 8])
    model = keras.Model(inputs, layers.Dense(2, name="last")(hidden(inputs)))
    copy = quantize.apply(model, {"block/query": 8, "last": 8})
    assert "'block/query' (in 'block'" in caplog.text
    assert hasattr(copy.get_layer("last"), "quantization")


def test_lora_is_refused():
    model = keras.Sequential([keras.Input([8]), layers.Dense(8, name="hidden")])
    model.layers[0].enable_lora(2)
    with pytest.raises(ValueError, match="hidden' of .* has LoRA weights"):
        quantize.apply(model, {"hidden": 8})


def square(x):
    return x * x


class Function(layers.Layer):
    """A layer that keeps a function as Keras's own layers do."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)

    def get_config(self):
        return {**super().get_config(), "function": keras.saving.serialize_keras_object(square)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("function")), **config)


def test_a_layer_that_reads_its_function_from_a_configuration_is_copied():
    net = [keras.Input([8]), Function(square), layers.Dense(2, name="last")]
    model, x = keras.Sequential(net), numbers()
    copy = quantize.apply(model, {"last": 15})
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(copy.predict(x, verbose=0), expected, atol=1e-3)


def test_copies_end_with_their_last_reference_though_the_model_has_a_lambda():
    net = [keras.Input([8]), layers.Lambda(lambda x: 2 * x), layers.Dense(2, name="last")]
    model = keras.Sequential(net)
    copy = quantize.apply(model, {"last": 15})
    layer = weakref.ref(copy.get_layer("last"))
    del copy
    gc.collect()
    assert layer() is None


def test_samples_without_an_end_are_refused(monkeypatch):
    module = importlib.import_module("tfscale.analysis.quantize.apply")
    monkeypatch.setattr(module, "_MOST_BATCHES", 5)
    model = keras.Sequential([keras.Input([8]), layers.Dense(2, name="last")])
    endless = ((numbers(4),) for _ in itertools.count())
    with pytest.raises(ValueError, match="x has more than 5 batches, or no end"):
        quantize.apply(model, {"last": 8}, endless)
