"""Tensor parallelism: programs whose weights are in slices train as on one device.

Numbers are float64, so that a wrong sum shows: rounding is below 1e-12.
"""

import contextlib
import re
import typing

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import tfscale
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.objects import native
from tfscale.strategy.grid.spread import SpreadArrays
from tfscale.strategy.placed import Placed

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.skipif(KERAS_2, reason="grids need Keras 3"),
]


def grid(rules, devices=2, tensor=2, **settings):
    names = [f"CPU:{place}" for place in range(devices)]
    return tfscale.ScaleStrategy(
        devices=names, grid=tfscale.Grid(tensor=tensor), tensor=rules, **settings
    )


# -------------------------------------------------------------------------- programs

FUNCTIONAL = {
    "up": "columns", "down": "rows", "table": "vocabulary", "attention": "heads", "alone": "columns"
}  # fmt: skip


def functional():
    words = keras.Input((5,), dtype="int32")
    x = layers.Embedding(16, 8, name="table")(words)
    x = x + layers.MultiHeadAttention(4, 3, name="attention")(x, x)
    x = layers.Flatten()(x)
    x = layers.BatchNormalization()(layers.Dense(12, "tanh")(x))
    up = layers.Dense(16, name="up")(x)
    x = x + layers.Dense(12, name="down")(keras.ops.gelu(up))
    x = layers.Dense(8, "softmax", name="alone", kernel_regularizer="l2")(x)
    return keras.Model(words, layers.Dense(3)(x))


class Block(layers.Layer):
    """Transformer block as tutorials of Keras write it."""

    def __init__(self, width, heads, inner):
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width // heads, name="attention")
        self.ffn = keras.Sequential(
            [layers.Dense(inner, "relu", name="up"), layers.Dense(width, name="down")], name="ffn"
        )
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]

    def call(self, x):
        x = self.norms[0](x + self.attention(x, x, use_causal_mask=True))
        return self.norms[1](x + self.ffn(x))


class Language(keras.Model):
    """Subclassed model whose output layer is its table."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(16, 8, name="table", mask_zero=True)
        self.block = Block(8, 2, 12)

    def call(self, words):
        hidden = self.block(self.table(words))
        return keras.ops.matmul(hidden[:, 0], keras.ops.transpose(self.table.embeddings))[:, :3]


def grouped():
    words = keras.Input((5,), dtype="int32")
    x = layers.Embedding(16, 8)(words)
    x = x + layers.GroupQueryAttention(4, 4, 2, name="attention")(x, x)
    x = layers.EinsumDense("abc,cd->abd", (None, 6), "relu", bias_axes="d", name="wide")(x)
    x = layers.EinsumDense("abc,cd->abd", (None, 8), bias_axes="d", name="narrow")(x)
    return keras.Model(words, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def convolutions():
    words = keras.Input((5,), dtype="int32")
    x = layers.Reshape((5, 4, 2))(layers.Embedding(16, 8)(words))
    x = layers.Conv2D(6, 3, padding="same", activation="relu", name="wide1")(x)
    x = layers.Conv2D(4, 2, 2, name="narrow1")(layers.MaxPooling2D(2, 1)(x))
    x = layers.Reshape((2, 4))(x)
    x = layers.Conv1D(8, 2, padding="causal", name="wide2")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Conv1D(6, 1, use_bias=False, name="narrow2")(x)
    return keras.Model(words, layers.Dense(3)(layers.Flatten()(x)))


PROGRAMS = {
    "convolutions": (convolutions, {"wide": "columns", "narrow": "rows"}),
    "functional": (functional, FUNCTIONAL),
    "subclassed": (
        Language,
        {"ffn/up": "columns", "ffn/down": "rows", "attention": "heads", "table": "vocabulary"},
    ),
    "grouped": (grouped, {"attention": "heads", "wide": "columns", "narrow": "rows"}),
}

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.05, epsilon=1e-4),
    "accumulating": lambda: optimizers.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=2),
    "averaging": lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "scaling": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=1024.0),
}


def data(rows=50):
    draw = np.random.default_rng(0)
    return draw.integers(0, 16, (rows, 5)), draw.integers(0, 3, rows)


def made(strategy, program, optimizer=OPTIMIZERS["sgd"]):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = program()
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
        )
    return model


def numbers(model):
    return [np.array(v.numpy()) for v in (*model.weights, *model.optimizer.variables)]


def trained(model, epochs=2):
    """Return all numbers that a training leaves or shows."""
    x, y = data()
    own = {"validation_data": (x[:30], y[:30]), "validation_batch_size": 7, "verbose": 0}
    history = model.fit(x, y, 16, epochs, shuffle=False, **own).history
    shown = [*history.values(), model.evaluate(x, y, 15, verbose=0)]
    return [*numbers(model), *map(np.array, shown), model.predict(x, 15, verbose=0)]


def assert_near(found, expected, tolerance=1e-12):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, optimizer, devices, tensor",
    [
        pytest.param("functional", "adamw", 2, 2, marks=pytest.mark.full),
        ("functional", "accumulating", 2, 2),
        ("functional", "averaging", 4, 2),
        pytest.param("functional", "scaling", 2, 2, marks=pytest.mark.full),
        pytest.param("functional", "sgd", 4, 4, marks=pytest.mark.full),
        ("subclassed", "sgd", 4, 2),
        pytest.param("subclassed", "adamw", 2, 2, marks=pytest.mark.full),
        ("grouped", "sgd", 2, 2),
        ("convolutions", "adamw", 4, 2),
    ],
)
def test_slices_train_as_one_device(program, optimizer, devices, tensor):
    build, rules = PROGRAMS[program]
    expected = trained(made(None, build, OPTIMIZERS[optimizer]))
    strategy = grid(rules, devices, tensor)
    assert_near(trained(made(strategy, build, OPTIMIZERS[optimizer])), expected)


class OwnStep(keras.Model):
    """Model with a step, a loss and a sum over the batch of its own."""

    def __init__(self):
        super().__init__()
        self.up = layers.Dense(8, "relu", name="up")
        self.down = layers.Dense(4, name="down")
        self.seen = keras.metrics.Sum("seen")

    def call(self, x):
        return self.down(self.up(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(self(x, training=True) - y), -1))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        self.seen.update_state(tf.ones(tf.shape(x)[0]))
        return {"loss": loss, "seen": self.seen.result()}


def assert_steps_are_those_of_one_device(program, devices=2, rate=0.05, loss=None):
    """Compare weights, logs and predictions of a model with a step of its own."""
    x = np.random.default_rng(0).standard_normal((22, 4))

    def result(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = program()
            model.compile(optimizers.SGD(rate), loss)
        history = model.fit(x, x, 8, 2, shuffle=False, verbose=0).history
        predicted = model.predict(x, 8, verbose=0)
        return [*numbers(model), *map(np.array, history.values()), predicted]

    assert_near(result(grid({"up": "columns", "down": "rows"}, devices)), result(None))


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_of_a_users_own(devices):
    assert_steps_are_those_of_one_device(OwnStep, devices)


class ByInputs(keras.Model):
    """Model with a penalty on gradients by its inputs, and samples that climb the loss."""

    def __init__(self):
        super().__init__()
        self.up = layers.Dense(8, "tanh", name="up")
        self.down = layers.Dense(4, name="down")

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self.down(self.up(x))
        return outputs + tape.gradient(outputs, x)

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(x)
                own = tf.reduce_mean(tf.square(self(x)))
            x += 20.0 * tape.gradient(own, x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            loss += self.compute_loss(x, y, self(x, training=True))
        grads, by_inputs = tape.gradient(loss, [self.trainable_variables, x])
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss, "slope": tf.reduce_sum(tf.square(by_inputs))}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.full)])
def test_gradients_by_inputs_are_whole(devices):
    assert_steps_are_those_of_one_device(ByInputs, devices, loss="mse")


class ClipsItself(OwnStep):
    """Model that clips the gradient of a mean of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        grads, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.5)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"norm": norm}


@pytest.mark.slow
def test_a_step_clips_the_gradient_of_its_own_mean():
    assert_steps_are_those_of_one_device(ClipsItself, rate=0.5)


class ReadsBetween(keras.Model):
    """Functional model whose step reads what lies between its two layers."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            between = self.get_layer("up")(x)
            wrong = self.get_layer("down")(between) - y
            norms = tf.reduce_mean(tf.reduce_mean(tf.norm(between, axis=-1), -1))
            loss = tf.reduce_mean(tf.reduce_mean(tf.square(wrong), (-2, -1))) + norms
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


def pair_and(*between, kind=keras.Model, **more):
    """Return a model of sequences of 6 x 8: columns, then layers, then rows."""
    x = inputs = keras.Input((6, 8))
    for layer in (layers.Dense(16, "tanh", name="up", **more), *between):
        x = layer(x)
    return kind(inputs, layers.Dense(8, name="down")(x))


def attention(**more):
    x = keras.Input((6, 8))
    return keras.Model(x, layers.MultiHeadAttention(4, 3, name="attention", **more)(x, x))


def mixer():
    """Rows that are sums over the sequence, of columns that lie along the last axis."""
    x = inputs = keras.Input((6, 8))
    x = layers.Dense(8, "relu", name="up")(x)
    x = layers.EinsumDense("bsd,st->btd", (6, 8), name="down")(x)
    return keras.Model(inputs, layers.Dense(8)(keras.ops.mean(x, -1, keepdims=True)[:, :6]))


PAIR, HEADS = {"up": "columns", "down": "rows"}, {"attention": "heads"}

# Programs that read whole outputs where slices would do for others.
READERS = {
    "a regularizer of what columns give": (PAIR, lambda: pair_and(activity_regularizer="l2")),
    "a regularizer between": (PAIR, lambda: pair_and(layers.ReLU(activity_regularizer="l2"))),
    "a step of its own": (PAIR, lambda: pair_and(kind=ReadsBetween)),
    "a regularizer of heads": (HEADS, lambda: attention(activity_regularizer="l2")),
    "a gate": (HEADS, lambda: attention(use_gate=True)),
    "sums over another axis": (PAIR, mixer),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("program", READERS)
def test_whoever_reads_slices_gets_whole_arrays(program):
    rules, build = READERS[program]
    x = np.random.default_rng(0).standard_normal((22, 6, 8))

    def result(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = build()
            model.compile(optimizers.SGD(0.05), "mse")
        losses = model.fit(x, x, 8, 2, shuffle=False, verbose=0).history["loss"]
        return [*numbers(model), np.array(losses), model.predict(x, 8, verbose=0)]

    assert_near(result(grid(rules)), result(None))


@pytest.mark.parametrize("are_read", [False, True])
def test_a_pair_gathers_only_what_is_read_between(are_read, monkeypatch):
    gathered = []
    gather = SpreadArrays._gather

    def noted(arrays, shown):
        gathered.append(shown.name)
        gather(arrays, shown)

    monkeypatch.setattr(SpreadArrays, "_gather", noted)
    with grid({"up": "columns", "down": "rows"}).scope():
        between = layers.LayerNormalization() if are_read else layers.Activation("gelu")
        model = pair_and(layers.Dropout(0.5, name="drop"), between)
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 6, 8)), np.ones((4, 6, 8)), verbose=0)
    assert set(gathered) == ({"drop"} if are_read else set())


def test_rows_that_drop_their_numbers_together_do_so_in_slices():
    def partly(_, x):
        """Share of rows of which some numbers are dropped, and others are not."""
        return keras.ops.cast(keras.ops.logical_and(x > 1, x < 31), "float32")

    with grid({"up": "columns", "down": "rows"}).scope():
        ones = {"kernel_initializer": "ones"}
        between = layers.Dropout(0.5, noise_shape=(None, 1))
        model = keras.Sequential(
            [layers.Dense(16, name="up", **ones), between, layers.Dense(1, name="down", **ones)]
        )
        model.compile(optimizers.SGD(0.0), "mse", metrics=[partly])
    ones = np.ones((64, 1))
    assert model.fit(ones, ones, 32, verbose=0).history["partly"] == [0.0]


def test_scores_of_attention_along_one_of_several_axes():
    x = np.random.default_rng(0).standard_normal((4, 3, 5, 8))

    def result(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            inputs = keras.Input((3, 5, 8))
            layer = layers.MultiHeadAttention(4, 3, attention_axes=(2,), name="attention")
            model = keras.Model(inputs, layer(inputs, inputs, return_attention_scores=True))
            model.compile("sgd", "mse")
        return model.predict(x, verbose=0)

    assert_near(result(grid({"attention": "heads"})), result(None))


def test_indices_count_from_the_end_of_a_table_and_others_fail():
    def build():
        words = keras.Input((2,), dtype="int32")
        return keras.Model(words, layers.Flatten()(layers.Embedding(16, 3, name="table")(words)))

    strategy, x = grid({"table": "vocabulary"}), np.array([[3, -1], [-16, 15]])
    model = made(strategy, build)
    np.testing.assert_array_equal(model.predict(x, verbose=0), made(None, build)(x))
    for wrong in (16, -17):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="outside of the rows of the layer table"
        ):
            model.predict(np.array([[3, wrong], [0, 1]]), verbose=0)


def test_columns_of_sequences_that_are_as_long_as_a_bias():
    """Keras takes an axis with the size of the whole bias for that of channels."""
    x = np.random.default_rng(0).standard_normal((12, 16, 8))

    def result(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            inputs = keras.Input((16, 8))
            up = layers.Dense(16, "gelu", name="up", bias_initializer="random_normal")(inputs)
            model = keras.Model(inputs, layers.Dense(8, name="down")(up))
            model.compile("sgd", "mse")
        model.fit(x, x, 6, verbose=0, shuffle=False)
        return numbers(model)

    assert_near(result(grid({"up": "columns", "down": "rows"})), result(None))


def test_eager_steps():
    def result(strategy):
        model = made(strategy, functional)
        model.run_eagerly = True
        x, y = data(12)
        model.fit(x, y, 6, verbose=0, shuffle=False)
        return numbers(model)

    assert_near(result(grid(FUNCTIONAL)), result(None))


class Dropped(layers.Layer):
    """Notes which numbers each replica has dropped."""

    masks: typing.ClassVar[dict[int, np.ndarray]] = {}

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        def note(replica, x):
            self.masks[int(replica)] = np.array(x) == 0

        context = tf.distribute.get_replica_context()
        tf.py_function(note, [context.replica_id_in_sync_group, x], [])
        return x


@pytest.mark.parametrize("are_slices", [True, False])
def test_slices_drop_different_numbers_and_copies_the_same(are_slices, monkeypatch):
    monkeypatch.setattr(Dropped, "masks", {})
    monkeypatch.setattr("tfscale.strategy.grid.layers.calls_stock_code", lambda layer: True)
    monkeypatch.setattr(
        "tfscale.strategy.grid.layers.is_elementwise",
        lambda operation: type(operation) in (layers.Dropout, Dropped),
    )
    with grid({"up": "columns", "down": "rows"}).scope():
        inputs = keras.Input((6,))
        first = {"name": "up", "kernel_initializer": "zeros", "bias_initializer": "ones"}
        x = layers.Dense(64, **first)(inputs) if are_slices else inputs
        x = Dropped()(layers.Dropout(0.5)(x))
        x = x if are_slices else layers.Dense(64, **first)(x)
        model = keras.Model(inputs, layers.Dense(2, name="down")(x))
        model.compile("sgd", "mse")
    model.fit(np.ones((16, 6)), np.ones((16, 2)), 16, verbose=0)
    one, other = Dropped.masks[0], Dropped.masks[1]
    assert one.shape == other.shape == (16, 32 if are_slices else 6)
    assert 0.2 < one.mean() < 0.8
    assert np.array_equal(one, other) != are_slices


# ---------------------------------------------------------------- who holds what, files


def test_replicas_hold_what_the_table_says(tmp_path):
    strategy = grid(FUNCTIONAL, 4)
    model = made(strategy, functional)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    table = strategy.layouts()
    slots = model.optimizer.variables[2:]
    for rank in range(4):
        copies = [v.value.values[rank] for v in (*model.trainable_variables, *slots)]
        assert table.numbers(rank) == sum(v.shape.num_elements() for v in copies)
    split = {row.path for row in table if row.weight[0].held(0) < row.weight[0].numbers}
    assert "up/kernel" in split and "attention/query/bias" in split and "down/bias" not in split
    assert "cut along axis 1 among 2 ranks, in each of 2 teams" in str(table)
    assert all(isinstance(v.value, Placed) for v in slots if "up_kernel" in v.path)


@pytest.mark.slow
def test_files_are_those_of_one_device(tmp_path):
    model = made(grid(FUNCTIONAL), functional)
    trained(model, 1)
    model.save(tmp_path / "model.keras")
    saved = numbers(model)
    expected = trained(model)
    for strategy in (None, grid({"down": "rows"}, 4, 4)):
        with strategy.scope() if strategy else contextlib.nullcontext():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        for one, other in zip(numbers(loaded), saved, strict=True):
            np.testing.assert_array_equal(one, other)
        assert_near(trained(loaded), expected)


# ------------------------------------------------------------------------ refusals


def dense(units=8, **more):
    return keras.Sequential([keras.Input((4,)), layers.Dense(units, name="up", **more)])


def einsum(equation, shape):
    return keras.Sequential([keras.Input((4,)), layers.EinsumDense(equation, shape, name="up")])


def test_a_pattern_that_matches_a_kernel_cuts_the_layer():
    """A bias is cut with its kernel."""

    def outcome(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = dense()
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).standard_normal((16, 4))
        model.fit(x, np.ones((16, 8)), 8, 2, 0, shuffle=False)
        return model, [*model.get_weights(), model.predict(x, verbose=0)]

    model, found = outcome(grid({"up/kernel": "columns"}))
    assert [tuple(native(v).values[0].shape) for v in model.weights] == [(4, 4), (4,)]
    assert_near(found, outcome(None)[1], 1e-6)


def test_a_rule_may_match_one_of_several_models():
    with grid({"up": "columns", "down": "rows"}).scope():
        inputs = keras.Input((4,))
        encoder = keras.Model(inputs, layers.Dense(8, name="up")(inputs))
        model = keras.Model(inputs, layers.Dense(4, name="down")(encoder(inputs)))
        model.compile("sgd", "mse")
        x = np.ones((4, 4))
        expected = np.array(encoder(x))
        np.testing.assert_allclose(encoder.predict(x, verbose=0), expected, atol=1e-12)


def test_a_tape_outside_of_steps_differentiates_by_inputs_only():
    with grid({"up": "columns"}).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="up")])
    x = tf.ones((2, 4), tf.float64)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        loss = tf.reduce_sum(model(x))
    assert tape.gradient(loss, x).shape == x.shape
    with pytest.raises(ValueError, match="gradient of .*up/kernel outside of a step"):
        tape.gradient(loss, model.trainable_variables)


def test_a_layer_that_the_first_step_builds_and_cannot_cut_is_named():
    with grid({"up": "columns"}).scope():
        model = keras.Sequential([layers.Dense(3, name="up")])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="2 does not divide 3"):
        model.fit(np.ones([4, 4], "f4"), np.ones([4, 3], "f4"), verbose=0)
    with grid({"up": "columns"}).scope():  # what could not be made is forgotten
        model = keras.Sequential([layers.Dense(4, name="up")])
        model.compile("sgd", "mse")
    model.fit(np.ones([4, 4], "f4"), np.ones([4, 4], "f4"), verbose=0)


@pytest.mark.parametrize(
    "rules, model, optimizer, words",
    [
        ({"up": "columns"}, lambda: einsum("ab,b->a", ()), "sgd", "the last axis of its output"),
        ({"up": "rows"}, lambda: einsum("ab,bc->abc", (4, 3)), "sgd", "a sum over exactly one"),
        ({"nothing": "rows"}, dense, "sgd", "the rule 'nothing' of tensor= matches no weight"),
        ({"up": "heads"}, dense, "sgd", "/up/kernel, a weight of a Dense"),
        ({"up/bias": "columns"}, dense, "sgd", "/up/bias, but not sequential"),
        ({"up": "columns"}, lambda: dense(3), "sgd", "2 does not divide 3"),
        ({"up": "columns"}, dense, optimizers.Lamb, "Lamb may need all numbers of a weight"),
        (
            {"up": "columns"},
            lambda: dense(kernel_constraint=keras.constraints.MaxNorm(1)),
            "sgd",
            "the constraint MaxNorm of ",
        ),
    ],
)
def test_what_cannot_be_cut_is_named(rules, model, optimizer, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        with grid(rules).scope():
            built = model()
            built.compile(optimizer if isinstance(optimizer, str) else optimizer(), "mse")
        built.fit(np.ones((8, 4)), np.ones((8, built.output_shape[-1])), verbose=0)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"tensor": {"a": "rows"}}, "has one slice"),
        ({"grid": tfscale.Grid(tensor=2)}, "no rule says which weights are split"),
        ({"grid": tfscale.Grid(tensor=2), "tensor": {"a": "rows"}, "shard": "all"}, "shard='all'"),
        (
            {
                "grid": tfscale.Grid(tensor=2),
                "tensor": {"a": "rows"},
                "sync": tfscale.sync.LocalSGD(every=2),
            },
            "each replica trains alone",
        ),
        ({"grid": tfscale.Grid(tensor=3), "tensor": {"a": "rows"}}, "a multiple of 3 replicas"),
        ({"grid": 2}, "a grid, such as tfscale.Grid(tensor=2)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        tfscale.ScaleStrategy(devices=["CPU:0", "CPU:1"], **settings)


def test_a_step_that_is_passed_to_run_is_refused():
    strategy = grid({"up": "columns"})
    with strategy.scope():
        model = dense()
        optimizer = optimizers.SGD(0.1)

    @tf.function
    def step():
        def on_replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.ones((4, 4), tf.float64)))
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        strategy.run(on_replica)

    with pytest.raises(ValueError, match="several replicas read the same rows"):
        step()
