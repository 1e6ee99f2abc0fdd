"""Pipelines: a model in stages trains as one device does, in each order and for uneven batches."""

import contextlib
import functools
import gc
import json
import re
import time
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import PATIENCE
from keras import ops

import tfscale
from tests.strategy.doubles import doubles
from tests.strategy.groups import SECONDS, start
from tests.strategy.pipelines import (
    OPTIMIZERS,
    Microbatched,
    compiled,
    data,
    embedded,
    lookups,
    normalized,
    perceptron,
    recurrent,
    residual,
    trained,
    transformer,
)
from tfscale.parallel.pipeline import Call, Pipeline, balanced_stages, crossing, named_stages
from tfscale.plan import pipelines

pytestmark = pytest.mark.timeout(SECONDS)

layers = keras.layers
full = pytest.mark.full


def pipelined(stages=2, devices=None, shard=None, **settings):
    names = [f"CPU:{place}" for place in range(devices or stages)]
    own = {
        "pipeline": Pipeline(**{"microbatches": 4, **settings}),
        "grid": tfscale.Grid(stages=stages),
    }
    return tfscale.ScaleStrategy("ring", devices=names, deadline=60, shard=shard, **own)


def assert_near(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


# ---------------------------------------------------------------------------- exactness


@functools.cache
def on_one_device(build, optimizer):
    """Model and everything that its training shows, in float32."""
    return trained(None, build, OPTIMIZERS[optimizer])


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("build", "optimizer", "stages", "settings"),
    [
        (perceptron, "adam", 2, {"order": "gpipe"}),
        pytest.param(perceptron, "averages", 2, {"cuts": ["layer2"]}, marks=full),
        pytest.param(perceptron, "window", 2, {}, marks=full),
        pytest.param(perceptron, "lamb", 2, {}, marks=full),
        (perceptron, "sgd", 3, {"microbatches": 2}),  # fewer microbatches than stages
        pytest.param(perceptron, "sgd", 2, {"order": "interleaved"}, marks=full),
        (perceptron, "adam", 3, {"order": "zero_bubble"}),
        (residual, "adam", 2, {"cuts": ["block1"]}),
        pytest.param(residual, "sgd", 3, {"microbatches": 3, "order": "gpipe"}, marks=full),
        pytest.param(embedded, "adam", 2, {"cuts": ["next"]}, marks=full),
        pytest.param(lookups, "adam", 2, {"cuts": ["next"]}, marks=full),
        (lookups, "adam", 2, {"order": "interleaved"}),
        (transformer, "adam", 2, {"cuts": ["norm1"]}),
        pytest.param(lookups, "adam", 4, {"order": "chimera"}, marks=full),
        (residual, "sgd", 2, {"order": "chimera"}),
        (
            recurrent,
            "sgd",
            2,
            {"order": "chimera", "microbatches": 2},
        ),  # with seeds from which nobody draws
        pytest.param(transformer, "adam", 4, {"order": "chimera"}, marks=full),
        pytest.param(embedded, "averages", 4, {"order": "chimera"}, marks=full),
        pytest.param(
            perceptron, "window", 4, {"order": pipelines.dualpipe, "microbatches": 8}, marks=full
        ),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_stages_train_as_one_device(build, optimizer, stages, settings):
    _, expected = on_one_device(build, optimizer)
    _, found = trained(pipelined(stages, **settings), build, OPTIMIZERS[optimizer])
    assert_near(found, expected)


@pytest.mark.slow
def test_statistics_and_random_numbers_are_those_of_microbatches():
    """Float64 shows a difference that rounding would hide."""
    with doubles():
        _, expected = trained(None, normalized, OPTIMIZERS["sgd"], oracle=Microbatched)
        _, found = trained(pipelined(2), normalized, OPTIMIZERS["sgd"])
    assert found["0 kernel"].dtype == "float64"
    assert_near(found, expected, 1e-12)


@pytest.mark.slow
def test_weights_that_a_layer_gets_later_train_in_its_stage():
    def tuned(strategy):
        model, _ = trained(strategy, perceptron, OPTIMIZERS["sgd"], epochs=1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            for name in ("layer0", "layer3"):
                model.get_layer(name).enable_lora(2)
            compiled(model, OPTIMIZERS["sgd"])
        model.fit(*data(model, 58), 16, 2, 0, shuffle=False)
        return {f"{i} {v.name}": v.numpy() for i, v in enumerate(model.weights)}

    expected = tuned(None)
    assert all(np.any(value) for name, value in expected.items() if "lora_kernel_b" in name)
    assert_near(tuned(pipelined(2)), expected)


@pytest.mark.slow
def test_weights_that_were_frozen_when_the_model_was_cut_train_later():
    def thawed(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = perceptron()
            for frozen in (True, False):
                for name in ("layer0", "layer3"):
                    model.get_layer(name).trainable = not frozen
                compiled(model, OPTIMIZERS["sgd"])
                model.fit(*data(model, 58), 16, 1, 0, shuffle=False)
        return {f"{i} {v.name}": v.numpy() for i, v in enumerate(model.weights)}

    assert_near(thawed(pipelined(2)), thawed(None))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.full)])
def test_models_that_share_layers(order):
    """Transfer learning: a model trains, then one on top of it, then a part of both predicts."""

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            base = compiled(perceptron(), OPTIMIZERS["sgd"])
            x, y = data(base, 20)
            base.fit(x, y, 8, verbose=0, shuffle=False)
            features = base.get_layer("layer3").output
            head = layers.Dense(5, "tanh", name="head1")(layers.Dense(4, name="head0")(features))
            model = keras.Model(base.inputs, layers.Dense(3, name="head2")(head))
            for frozen in (True, False):
                base.trainable = not frozen
                compiled(model, OPTIMIZERS["sgd"]).fit(x, y, 8, verbose=0, shuffle=False)
            base.fit(x, y, 8, verbose=0, shuffle=False)
            base.trainable = False
            with pytest.warns(UserWarning, match="frozen|not have any trainable"):
                compiled(base, OPTIMIZERS["sgd"]).train_on_batch(x, y)
            found = {"features": keras.Model(base.inputs, features).predict(x, 8, verbose=0)}
        return found | {f"{i} {v.name}": v.numpy() for i, v in enumerate(model.weights)}

    assert_near(trained(pipelined(2, order=order)), trained(None))


def folded():
    """Rows of frames, and a number without rows, cross the cut; an output has rows of frames."""
    inputs = keras.Input((7,))
    x = layers.Dense(3, "tanh")(ops.reshape(inputs[:, :6], (-1, 2)))
    frames = layers.Dense(4)(layers.Dense(12, "tanh", name="wide")(x))
    x = ops.reshape(frames, (-1, 12)) * (1 + 0 * ops.sum(x))
    return keras.Model(inputs, layers.Dense(3, name="last")(x)), frames


@pytest.mark.slow
def test_tensors_of_other_rows_than_the_batch_cross_a_cut():
    def results(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model, frames = folded()
            x, y = data(compiled(model, OPTIMIZERS["sgd"]), 19)
            model.fit(x, y, 8, verbose=0, shuffle=False)
            found = {"frames": keras.Model(model.inputs, frames).predict(x, 8, verbose=0)}
        return found | {f"{i} {v.name}": v.numpy() for i, v in enumerate(model.weights)}

    assert_near(results(pipelined(2, cuts=["wide"])), results(None))


class Adds(layers.Layer):
    """Layer that adds losses which divide by sizes, or by nothing."""

    def call(self, x):
        rows = ops.cast(ops.shape(x)[0], x.dtype)
        self.add_loss(1e-2 * ops.sum(x))
        self.add_loss(1e-2 * ops.sum(x**2) / rows)
        self.add_loss(1e-2 * ops.sum(x**2) / ops.cast(ops.size(x), x.dtype))
        self.add_loss(1e-2 * ops.mean(ops.abs(x)))
        return x


class AddsRatio(layers.Layer):
    """Layer that adds a loss which divides by a number that only the data tell."""

    def call(self, x):
        self.add_loss(ops.sum(x) / ops.sum(ops.cast(x > 0, x.dtype)))
        return x


def adding(kind=Adds):
    x = start = keras.Input((7,))
    x = layers.Dense(8, "tanh", activity_regularizer="l1", name="first")(x)
    x = layers.Dense(8, activity_regularizer="l2", name="second")(kind(name="adds")(x))
    return keras.Model(start, layers.Dense(3, name="last")(x))


@pytest.mark.slow
@pytest.mark.parametrize(  # 48: TensorFlow knows the number of rows of a batch
    ("rows", "cut"),
    [
        (48, "last"),
        *(pytest.param(*case, marks=full) for case in ((58, "adds"), (58, "last"), (48, "adds"))),
    ],
)
def test_losses_that_layers_add_are_those_of_the_batch(cut, rows):
    with doubles():
        _, expected = trained(None, adding, OPTIMIZERS["sgd"], rows=rows)
        _, found = trained(pipelined(cuts=[cut]), adding, OPTIMIZERS["sgd"], rows=rows)
    assert_near(found, expected, 1e-12)


class Counts(layers.Layer):
    """Layer whose metric counts what goes through it."""

    def __init__(self, **more):
        super().__init__(**more)
        self.seen = keras.metrics.Mean(name=f"{self.name}_seen")

    def call(self, x):
        self.seen.update_state(ops.abs(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"devices": 4}, marks=full),
        pytest.param({"tensor": 2, "devices": 4}, marks=full),
    ],
)
def test_metrics_of_layers_count_in_each_stage(settings):
    def seen(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            inputs = keras.Input([6])
            x = Counts(name="early")(layers.Dense(4, "tanh", name="up")(inputs))
            x = Counts(name="late")(layers.Dense(4, "tanh", name="down")(x))
            model = keras.Model(inputs, layers.Dense(3)(x))
            model.compile("sgd", "mse", metrics=["mae"])
        x = np.random.default_rng(0).standard_normal((21, 6))
        y = x[:, :3]
        found = model.fit(x, y, 8, 2, 0, shuffle=False, validation_data=(x[:9], y[:9])).history
        found |= model.train_on_batch(x[:8], y[:8], return_dict=True)
        return found | {
            f"test {k}": v for k, v in model.evaluate(x, y, 8, 0, return_dict=True).items()
        }

    settings = dict(settings)
    tensor, devices = settings.pop("tensor", 1), settings.pop("devices", 2)
    rules = {"up": "columns"} if tensor > 1 else None
    strategy = tfscale.ScaleStrategy(
        "ring",
        devices=[f"CPU:{i}" for i in range(devices)],
        deadline=60,
        grid=tfscale.Grid(stages=2, tensor=tensor),
        tensor=rules,
        pipeline=Pipeline(cuts=["late"], microbatches=3),
    )
    with doubles():
        assert_near(seen(strategy), seen(tf.distribute.get_strategy()), 1e-12)


@pytest.mark.slow
def test_experts_in_each_stage_take_microbatches():
    """Experts compute rows in an order of their own, and give the loss as many as they got."""

    def seen(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            x = inputs = keras.Input([5, 4])
            for place in range(2):
                y = tfscale.parallel.Experts(4, 6, k=2, balance=0.0, name=f"experts{place}")(x)
                x = layers.Add()([x, y])
            model = keras.Model(inputs, layers.Dense(4)(x))
            model.compile("adam", "mse")
        x = np.random.default_rng(0).standard_normal((21, 5, 4))
        return model.fit(x, x**2, 8, 2, 0, shuffle=False).history

    strategy = pipelined(2, cuts=["experts1"], microbatches=3)
    with doubles():
        assert_near(seen(strategy), seen(tf.distribute.get_strategy()), 1e-12)


@pytest.mark.parametrize("cut", ["adds", "last"])
def test_an_added_loss_whose_divisor_needs_later_microbatches_is_refused(cut):
    with pytest.raises(ValueError, match="differs between microbatches"):
        fitted(lambda: adding(AddsRatio), strategy=pipelined(cuts=[cut]))


@contextlib.contextmanager
def policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        pytest.param("mixed_float16", 1, marks=full),
        pytest.param("mixed_bfloat16", 1, marks=full),
        ("mixed_bfloat16", 4),
    ],
)
def test_mixed_precision(name, microbatches):
    """One device that makes the same microbatches rounds to 16 bits in the same places."""
    oracle = Microbatched if microbatches > 1 else None
    with policy(name):
        _, expected = trained(None, perceptron, OPTIMIZERS["sgd"], oracle=oracle)
        strategy = pipelined(2, microbatches=microbatches)
        _, found = trained(strategy, perceptron, OPTIMIZERS["sgd"])
    if microbatches > 1:
        # One device's prediction differs from its own model(x) by 2**-7, a digit of bfloat16.
        one, other = found.pop("predict"), expected.pop("predict")
        np.testing.assert_allclose(one.astype("f4"), other.astype("f4"), atol=2**-6)
    assert_near(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (perceptron, {"microbatches": 3}),
        pytest.param(embedded, {"microbatches": 3}, marks=full),
        pytest.param(perceptron, {"order": "chimera"}, marks=full),
    ],
)
def test_stages_times_data(build, settings):
    _, expected = on_one_device(build, "adam")
    _, found = trained(pipelined(2, devices=4, **settings), build, OPTIMIZERS["adam"])
    # Logs within an epoch are means over the parts of the data.
    assert_near(found | {"logs": expected["logs"]}, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "optimizer"),
    [
        (perceptron, "lamb"),
        pytest.param(embedded, "averages", marks=full),
        pytest.param(perceptron, "window", marks=full),
    ],
)
def test_replicas_of_one_stage_share_out_its_state(build, optimizer):
    _, expected = on_one_device(build, optimizer)
    strategy = pipelined(2, devices=4, shard="optimizer")
    model, found = trained(strategy, build, OPTIMIZERS[optimizer])
    assert_near(found | {"logs": expected["logs"]}, expected)
    rows = strategy.layouts()
    assert len(rows) == len(model.trainable_variables)
    for row in rows:
        for layout, _ in row.slots:  # one replica holds each number
            assert sum(layout.held(rank) for rank in range(4)) == layout.numbers, row.path
        assert [row.weight[0].held(rank) for rank in (0, 1)] == [
            row.weight[0].held(rank) for rank in (2, 3)
        ]


@pytest.mark.parametrize(
    ("layout", "build", "optimizer", "order"),
    [
        ("2x1", perceptron, "adam", "1f1b"),
        pytest.param("2x1", transformer, "adam", "gpipe", marks=pytest.mark.full),
        pytest.param("2x2", residual, "sgd", "1f1b", marks=pytest.mark.full),
        pytest.param("2x1", transformer, "adam", "chimera", marks=pytest.mark.full),
        pytest.param("2x2", residual, "sgd", "chimera", marks=pytest.mark.full),
    ],
)
def test_stages_of_processes_train_as_one_device(tmp_path, layout, build, optimizer, order):
    model, expected = on_one_device(build, optimizer)
    path = tmp_path / "model.keras"
    settings = {"BUILD": build.__name__, "OPTIMIZER": optimizer, "ORDER": order, "FILE": str(path)}
    with start("pipeline.py", layout, **settings) as group:
        outputs = group.wait(400)
    for output in outputs:
        (line,) = re.findall(r"^TRAINED (.*)$", output, re.MULTILINE)
        found = {name: np.array(value) for name, value in json.loads(line).items()}
        logs = {"logs": expected["logs"]} if layout == "2x2" else {}
        assert_near(found | logs, expected)
    loaded = keras.models.load_model(path)
    for one, other in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stage_that_was_killed_is_named_with_its_turn(victim):
    with start("stage.py", "2x1", VICTIM=str(victim), DEADLINE=str(PATIENCE)) as group:
        end = time.monotonic() + 300
        while not (found := re.search(r"^ERROR (.*)$", group.output(1 - victim), re.MULTILINE)):
            assert time.monotonic() < end, group.output(1 - victim)[-3000:]
            time.sleep(0.05)
    message = found[1]
    assert f"rank {victim} (worker {victim} at 127.0.0.1:" in message, message
    # The first message that fails is one of the step's: it names stages and a microbatch.
    assert re.search(r"(activation|gradient) of stage . for stage ., microbatch \d", message), (
        message
    )


# ------------------------------------------------------------------------ who holds what


def after_two_steps(strategy):
    with strategy.scope():
        model = compiled(perceptron(), OPTIMIZERS["adam"])
    model.fit(*data(model, 32), 16, verbose=0, shuffle=False)
    return model


def test_each_replica_holds_its_stage_only():
    strategy = pipelined(2, cuts=["layer2"])
    model = after_two_steps(strategy)
    slots = [v for v in model.optimizer.variables if v.shape.rank]
    for variables in (model.trainable_variables, slots):
        for variable in variables:
            sizes = [part.shape.num_elements() for part in variable.value.values]
            owner = 0 if any(name in variable.path for name in ("layer0", "layer1")) else 1
            assert sizes[owner] == np.prod(variable.shape) and sizes[1 - owner] == 0, variable.path


@pytest.mark.slow
def test_two_ranks_hold_the_stages_that_they_run_in_opposite_directions():
    strategy = pipelined(4, order="chimera")
    model = after_two_steps(strategy)
    for row in strategy.layouts():
        for layout, _ in (row.weight, *row.slots):
            assert sum(layout.held(rank) for rank in range(4)) == 2 * layout.numbers, row.path
            assert all(layout.held(rank) == layout.held(3 - rank) for rank in range(4))
    for variable in model.trainable_variables:  # twins have the same bits
        parts = [part.numpy() for part in variable.value.values]
        for rank in (0, 1):
            np.testing.assert_array_equal(parts[rank], parts[3 - rank], err_msg=variable.path)


@pytest.mark.slow
def test_a_strategy_does_not_keep_its_models_alive():
    model = after_two_steps(pipelined(2))
    kept = {"model": weakref.ref(model), "weight": weakref.ref(model.trainable_variables[0])}
    del model
    gc.collect()
    assert not [name for name, one in kept.items() if one() is not None]


SHARDED = {"stages": 2, "devices": 4, "shard": "optimizer"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({}, None),
        pytest.param({}, {"stages": 3, "microbatches": 2}, marks=full),
        pytest.param(SHARDED, None, marks=full),
        pytest.param({}, SHARDED, marks=full),
    ],
)
def test_files_are_those_of_one_device(tmp_path, first, other):
    path = tmp_path / "model.keras"
    model = after_two_steps(pipelined(**first))
    model.save(path)
    x, y = data(model, 48)
    strategy = None if other is None else pipelined(**other)
    with strategy.scope() if strategy else contextlib.nullcontext():
        loaded = keras.models.load_model(path)
    for one, expected in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), expected.numpy())
    for one, expected in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), expected.numpy())
    for each in (loaded, model):
        each.fit(x, y, 16, verbose=0, shuffle=False)
    for one, expected in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), expected.numpy(), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------- refusals


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def fitted(build, optimizer="sgd", strategy=None, **more):
    with (strategy or pipelined()).scope():
        model = compiled(build(), OPTIMIZERS[optimizer], **more)
    x = np.zeros((8, 7), "f4")
    model.fit(x, np.zeros(8, int), 8, verbose=0)


def overlapping(ranks, microbatches):
    """Return an order whose second rank makes all passes of the last microbatch."""
    one_way = pipelines.one_f_one_b(ranks, microbatches).turns
    kept, last = [], microbatches - 1
    for turns in one_way:
        kept.append(tuple(turn for turn in turns if turn.microbatch < last))
    works = pipelines.Work.FORWARD, pipelines.Work.BACKWARD
    own = [pipelines.Turn(works[0], last, stage) for stage in range(ranks)]
    own += [pipelines.Turn(works[1], last, stage) for stage in reversed(range(ranks))]
    turns = (*kept[:-1], (*kept[-1], *own))
    return pipelines.PipelineOrder("overlapping", ranks, microbatches, turns)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def own_step():
    model = perceptron()
    return OwnStep(model.inputs, model.outputs)


def test_what_cannot_be_cut_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'subclassed\w*' \(Subclassed\) has a call of its own"):
        fitted(Subclassed)
    with pytest.raises(ValueError, match=r"\(OwnStep\) has its own train_step"):
        fitted(own_step)
    with pytest.raises(ValueError, match="run_eagerly=True"):
        fitted(perceptron, run_eagerly=True)
    with pytest.raises(ValueError, match=r"has norm0/moving_mean on the ranks \[0, 1\]"):
        fitted(normalized, strategy=pipelined(2, order="chimera"))
    with pytest.raises(ValueError, match=r"has seed_generator\w*/\w* on the ranks \[0, 1\]"):
        fitted(lambda: recurrent(dropout=0.5), strategy=pipelined(2, order="chimera"))
    with pytest.raises(ValueError, match="cuts names 'nowhere', and the model has no layer"):
        fitted(perceptron, strategy=pipelined(cuts=["nowhere"]))


def test_a_model_that_turns_the_stages_of_another_around_is_refused():
    with pipelined(2).scope():
        base = compiled(perceptron(), OPTIMIZERS["sgd"])
        first, last = base.get_layer("layer0"), base.layers[-1]
        inputs = keras.Input([last.kernel.shape[0]])
        between = layers.Dense(first.kernel.shape[0], name="between")(last(inputs))
        with pytest.raises(ValueError, match="calls 'layer0' behind .* Compile the model with the"):
            compiled(keras.Model(inputs, first(between)), OPTIMIZERS["sgd"])
        whole = keras.Input(base.input_shape[1:])
        with pytest.raises(ValueError, match=f"calls '{base.name}' in one stage"):
            compiled(keras.Model(whole, layers.Dense(3)(base(whole))), OPTIMIZERS["sgd"])


def test_an_optimizer_that_keeps_numbers_beside_its_slots_is_refused():
    with pipelined().scope():
        model = compiled(perceptron(), lambda: keras.optimizers.Adafactor(0.01))
    with pytest.raises(ValueError, match="some replicas update a weight, and the others would not"):
        model.fit(np.zeros((8, 7), "f4"), np.zeros(8, int), 8, verbose=0)


def test_a_loop_of_ones_own_is_refused():
    strategy = pipelined()
    with strategy.scope():
        model = compiled(perceptron(), OPTIMIZERS["sgd"])

    @tf.function
    def step():
        def on_replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.ones((8, 7)), training=True))
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, weights), weights)

        strategy.run(on_replica)

    with pytest.raises(ValueError, match=r"kernel is a weight of one stage of a pipeline, and"):
        step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": tfscale.Grid(stages=2)}, "nothing says how the model is cut"),
        ({"pipeline": Pipeline()}, "has one stage"),
        ({"grid": tfscale.Grid(stages=2), "pipeline": Pipeline(["a", "b"])}, "makes 3 stages"),
        (
            {"grid": tfscale.Grid(stages=2), "pipeline": Pipeline(order=overlapping)},
            r"gives rank 0 the stages \[0\] and rank 1 the stages \[0, 1\]",
        ),
        (
            {"grid": tfscale.Grid(stages=2), "pipeline": Pipeline(), "shard": "all"},
            "take shard='optimizer'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfscale.ScaleStrategy("ring", devices=["CPU:0", "CPU:1"], **arguments)


# -------------------------------------------------------------------------- cuts, as data


def test_a_stage_begins_with_its_layer():
    calls = [Call("a"), Call("b", (0,)), Call("c", (1,)), Call("d", (0, 2))]
    assert named_stages(calls, ["b", "d"]) == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="does not follow the model"):
        named_stages(calls, ["d", "b"])


def test_balanced_stages_are_small():
    calls = [Call(str(i), (i - 1,) if i else (), cost) for i, cost in enumerate([9, 1, 1, 1, 9])]
    assert balanced_stages(calls, 3) == [0, 1, 1, 1, 2]
    with pytest.raises(ValueError, match="cannot make 6 stages"):
        balanced_stages(calls, 6)


def test_tensors_cross_all_cuts_up_to_who_needs_them():
    needs = [(0, []), (1, [10]), (2, [10, 11])]
    assert crossing(needs, {10: 0, 11: 1}, 3) == [[10], [10, 11]]


def test_a_pipeline_shows_its_turns():
    strategy = pipelined(2, order="gpipe", microbatches=2)
    assert "rank 1, at most 2 live: F0 F1 B0 B1" in str(strategy.pipeline)
    assert strategy.pipeline.draw().axes
