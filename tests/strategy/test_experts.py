"""Experts that replicas share train as on one device.

Numbers are float64, so that a wrong sum shows: rounding is below 1e-12.
"""

import collections
import contextlib
import functools
import json
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import PATIENCE
from keras import layers, optimizers

import tfscale
from tests.strategy.groups import SECONDS, start
from tfscale.bridge.installed import KERAS_2
from tfscale.strategy.placed import Placed

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.skipif(KERAS_2, reason="Experts needs Keras 3"),
    pytest.mark.timeout(SECONDS),
]

if not KERAS_2:
    from tests.strategy import experts
    from tests.strategy.experts import data, made, numbers, perceptron, trained
    from tfscale.parallel import Experts


def shared(devices=2, experts=2, **settings):
    names = [f"CPU:{place}" for place in range(devices)]
    grid = tfscale.Grid(experts=experts) if experts > 1 else None
    return tfscale.ScaleStrategy("ring", devices=names, grid=grid, deadline=60, **settings)


def assert_near(found, expected, tolerance=1e-12):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


def assert_copies_are_alike(model, experts):
    for variable in (*model.weights, *model.optimizer.variables):
        parts = [part.numpy() for part in variable.value.values]
        for rank, part in enumerate(parts):
            same = parts[rank % experts if part.shape != tuple(variable.shape) else 0]
            np.testing.assert_array_equal(part, same, err_msg=variable.path)


@functools.cache
def on_one_device(program, optimizer="sgd", **more):
    return trained(made(None, getattr(experts, program), optimizer), **more)


full = pytest.mark.full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "optimizer", "devices", "shares"),
    [
        ("perceptron", "adam", 4, 2),
        pytest.param("perceptron", "clipping", 2, 2, marks=full),
        pytest.param("perceptron", "sgd", 4, 4, marks=full),
        pytest.param("perceptron", "averaging", 2, 2, marks=full),
        pytest.param("perceptron", "scaling", 2, 2, marks=full),
        ("capped", "sgd", 4, 2),
        pytest.param("capped", "adam", 2, 1, marks=full),
        pytest.param("lopsided", "sgd", 2, 2, marks=full),
        pytest.param("regular", "sgd", 2, 2, marks=full),
        pytest.param("twice", "sgd", 2, 2, marks=full),
        pytest.param("Language", "adam", 2, 2, marks=full),
        pytest.param("Language", "sgd", 4, 2, marks=full),
        ("Language", "sgd", 2, 1),
        pytest.param("OwnStep", "sgd", 2, 2, marks=full),
        pytest.param("OwnStep", "adam", 4, 2, marks=full),
    ],
)
def test_experts_train_as_on_one_device(program, optimizer, devices, shares):
    model = made(shared(devices, shares), getattr(experts, program), optimizer)
    assert_near(trained(model), on_one_device(program, optimizer))
    assert_copies_are_alike(model, shares)


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        pytest.param("experts", "perceptron", marks=full),
        ("experts", "OwnStep"),
        pytest.param("all", "OwnStep", marks=full),
    ],
)
def test_a_replica_without_rows_computes_its_share(kind, program):
    """Each batch has one row, so one of two replicas has no tokens of its own."""
    own = {"epochs": 1, "batch": 1, "rows": 5}
    strategy = shared() if kind == "experts" else shared(2, 1, shard="all")
    model = made(strategy, getattr(experts, program))
    assert_near(trained(model, **own), on_one_device(program, **own))


@pytest.mark.slow
def test_a_replica_whose_tokens_are_all_masked_computes_its_share():
    def result(strategy):
        model = made(strategy, experts.Language)
        x, y = data(model, 32)
        x[8:16] = x[24:] = 0
        model.fit(x, y, 16, 2, verbose=0, shuffle=False)
        return numbers(model)

    assert_near(result(shared()), result(None))


@pytest.mark.slow
def test_eager_steps():
    expected = on_one_device("perceptron", epochs=1)
    model = made(shared(), perceptron, run_eagerly=True)
    assert_near(trained(model, epochs=1), expected)


@pytest.mark.slow
def test_several_steps_at_once():
    """Each call of Keras's function makes three steps; the last call has one only."""
    expected = trained(made(None, perceptron, steps_per_execution=3), epochs=2)
    assert_near(trained(made(shared(), perceptron, steps_per_execution=3), epochs=2), expected)


@pytest.mark.slow
def test_mixed_precision_trains():
    """Replicas are about as far from float32 as one device is, in weights and in slots."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    exact = trained(made(None, experts.dense), epochs=2)
    keras.config.set_dtype_policy("mixed_bfloat16")
    one = trained(made(None, experts.dense), epochs=2)
    model = made(shared(), experts.dense)
    found = trained(model, epochs=2)

    def off(result):
        count = len(numbers(model))
        return max(np.max(np.abs(a - b)) for a, b in zip(result[:count], exact[:count]))

    assert 0 < off(one) < 0.05
    assert off(found) < 2 * off(one)
    assert model.get_layer("experts").up.dtype == "float32"


@pytest.mark.slow
def test_layers_with_lora_train_beside_experts():
    def adapted():
        model = perceptron()
        model.layers[1].enable_lora(2)
        return model

    expected = trained(made(None, adapted), epochs=1)
    # Keras makes the weights of LoRA as float32.
    assert_near(trained(made(shared(), adapted), epochs=1), expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "program"),
    [("slices", "capped"), ("stages", "perceptron"), ("TensorFlow", "twice")],
)
def test_each_replica_holds_all_experts_with_other_strategies(kind, program):
    names = [f"CPU:{place}" for place in range(4)]
    settings = {
        "slices": {"grid": tfscale.Grid(tensor=2), "tensor": {"first": "columns"}},
        "stages": {
            "grid": tfscale.Grid(stages=2),
            "pipeline": tfscale.Pipeline(microbatches=1, order="gpipe"),
        },
    }
    if kind == "TensorFlow":
        strategy = tf.distribute.MirroredStrategy(names[:2])
    else:
        strategy = tfscale.ScaleStrategy("ring", devices=names, deadline=60, **settings[kind])
    found = trained_evenly(made(strategy, getattr(experts, program)))
    assert_near(found, trained_evenly(made(None, getattr(experts, program))))


def trained_evenly(model):
    """Return the weights after steps of equally many rows on all replicas, as TensorFlow needs."""
    x, y = data(model, 32)
    model.fit(x, y, 16, 3, shuffle=False, verbose=0)
    return numbers(model)


class Own:
    """Makes a layer of experts whose class has a call of its own."""

    @staticmethod
    def program():
        class Doubled(Experts):
            def call(self, inputs, mask=None, training=None):
                return 2 * super().call(inputs, mask, training)

        inputs = keras.Input((6,))
        return keras.Model(inputs, layers.Dense(3)(Doubled(4, 5, activation="tanh")(inputs)))


@pytest.mark.slow
def test_a_layer_with_a_call_of_its_own_reads_whole_weights():
    expected = trained(made(None, Own.program), epochs=1)
    assert_near(trained(made(shared(), Own.program), epochs=1), expected)


# ---------------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "program", "optimizer"),
    [
        ("2x1", "perceptron", "adam"),
        pytest.param("2x1", "Language", "sgd", marks=full),
        pytest.param("2x2", "capped", "sgd", marks=full),
    ],
)
def test_experts_of_processes_train_as_on_one_device(tmp_path, layout, program, optimizer):
    expected = on_one_device(program, optimizer)
    path = tmp_path / "model.keras"
    settings = {"BUILD": program, "OPTIMIZER": optimizer, "FILE": str(path)}
    with start("mixture.py", layout, **settings) as group:
        outputs = group.wait(400)
    for output in outputs:
        (line,) = re.findall(r"^TRAINED (.*)$", output, re.MULTILINE)
        found = list(map(np.array, json.loads(line)))
        if layout == "2x2":  # logs within an epoch are means over the parts of the data
            found, expected = found[:-8], expected[:-8]
        assert_near(found, expected)
    if program != "Language":  # Keras cannot load a model of a class that it does not know
        loaded = keras.models.load_model(path)
        found = numbers(loaded)
        assert_near(found, on_one_device(program, optimizer)[: len(found)])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_worker_that_was_killed_with_its_experts_is_named(victim):
    with start("mixture.py", "2x1", VICTIM=str(victim), DEADLINE=str(PATIENCE)) as group:
        end = time.monotonic() + 300
        while not (found := re.search(r"^ERROR (.*)$", group.output(1 - victim), re.MULTILINE)):
            assert time.monotonic() < end, group.output(1 - victim)[-3000:]
            time.sleep(0.05)
        seconds = float(found[1].split()[0]) - event(group.output(victim))
    print(f"MEASURED the other worker knew after {seconds:.2f} s")
    assert f"rank {victim} (worker {victim} at 127.0.0.1:" in found[1], found[1]


def event(output):
    found = re.search(r"^EVENT (\S+)$", output, re.MULTILINE)
    assert found, output[-3000:]
    return float(found[1])


# ------------------------------------------------------------ who holds what, files, bytes


@pytest.mark.slow
def test_replicas_hold_their_shares_and_files_are_those_of_one_device(tmp_path):
    strategy = shared(4)
    model = made(strategy, perceptron, "adam")
    x, y = data(model, 48)

    def goes_on(model):
        model.fit(x, y, 16, verbose=0, shuffle=False)
        return numbers(model)

    goes_on(model)
    rows = {row.path: row for row in strategy.layouts()}
    for name in Experts.NAMES:
        weight = rows[f"experts/{name}"].weight[0]
        assert [weight.held(rank) for rank in range(4)] == [weight.numbers // 2] * 4
    assert rows["experts/router"].weight[0].held(0) == 32
    slots = [v for v in model.optimizer.variables if "experts_up" in v.path]
    assert len(slots) == 4 and all(isinstance(v.value, Placed) for v in slots)
    path = tmp_path / "model.keras"
    model.save(path)
    saved, expected = numbers(model), goes_on(model)
    for other in (None, shared(2), shared(4, 4)):
        with other.scope() if other else contextlib.nullcontext():
            loaded = keras.models.load_model(path)
        for one, whole in zip(numbers(loaded), saved, strict=True):
            np.testing.assert_array_equal(one, whole)
        assert_near(goes_on(loaded), expected)


def test_tokens_travel_once_to_other_replicas_and_back():
    strategy = shared()
    model = made(strategy, lambda: perceptron(balance=0))
    x, y = data(model, 64)
    layer = model.get_layer("experts")
    first = keras.Model(model.inputs, layer.input)
    probabilities = first.predict(x, verbose=0) @ layer.router.numpy()
    share = np.argsort(-probabilities, -1)[:, :2] // 2  # each replica has two of four experts
    others = np.sum(share != np.repeat([0, 1], 32)[:, np.newaxis])
    model.fit(x, y, 64, verbose=0, shuffle=False)
    logs = [c.log() for c in strategy.teams.experts.communicators]
    sent = collections.Counter()
    for execution in (each for log in logs for each in log):
        sent[execution.bucket.label] += execution.sent
    rows = 8 * 8 * others  # of eight numbers of eight bytes
    ways = ("rows to experts", "rows from experts")
    for way in (*ways, *(f"gradient of {way}" for way in ways)):
        assert sent.pop(way) == rows
    assert sum(sent.values()) == sent["numbers of rows to experts"] <= 0.01 * 4 * rows


# ------------------------------------------------------------------------ refusals


def without():
    return keras.Sequential([keras.Input((6,)), layers.Dense(3)])


def three():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(3)(Experts(3, 5, name="ffn")(inputs)))


@pytest.mark.parametrize(
    ("program", "optimizer", "words"),
    [
        ("without", optimizers.SGD, "has no layer tfscale.parallel.Experts"),
        ("three", optimizers.SGD, "the layer 'ffn' has 3 experts, and Grid(experts=2)"),
        ("perceptron", optimizers.Lamb, "Lamb may need all numbers of a weight"),
    ],
)
def test_models_that_do_not_fit_are_refused(program, optimizer, words):
    programs = {"without": without, "three": three, "perceptron": perceptron}
    with pytest.raises(ValueError, match=re.escape(words)):
        with shared().scope():
            model = programs[program]()
            model.compile(optimizer(), "mse")
        model.fit(np.ones((8, 6)), np.ones((8, 3)), verbose=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"grid": tfscale.Grid(experts=2, tensor=2), "tensor": {"a": "rows"}}, "does one of both"),
        ({"grid": tfscale.Grid(experts=2), "shard": "all"}, "shard='all'"),
        (
            {"grid": tfscale.Grid(experts=2), "sync": tfscale.sync.LocalSGD(every=2)},
            "each replica trains alone",
        ),
        ({"grid": tfscale.Grid(experts=3)}, "a multiple of 3 replicas"),
        ({"grid": tfscale.Grid(experts=2), "tensor": {"a": "rows"}}, "has one slice"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        tfscale.ScaleStrategy(devices=["CPU:0", "CPU:1"], **settings)
