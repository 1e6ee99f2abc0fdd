"""Domain parallelism: programs whose activations are in slices train as on one device.

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

import tfscale
from tests.strategy.groups import SECONDS, start
from tfscale.bridge.installed import KERAS_2

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.skipif(KERAS_2, reason="grids need Keras 3"),
    pytest.mark.timeout(SECONDS),
]

if not KERAS_2:
    from tests.strategy import images
    from tests.strategy.images import data, made, numbers, trained

full = pytest.mark.full


def cut(axis="height", devices=2, tensor=2, pattern="conv", **settings):
    names = [f"CPU:{place}" for place in range(devices)]
    grid = tfscale.Grid(tensor=tensor)
    return tfscale.ScaleStrategy(
        "ring", devices=names, grid=grid, tensor={pattern: axis}, deadline=60, **settings
    )


def assert_near(found, expected, tolerance=1e-12):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


def assert_copies_are_alike(model):
    for variable in (*model.weights, *model.optimizer.variables):
        first, *others = [part.numpy() for part in variable.value.values]
        for other in others:
            np.testing.assert_array_equal(first, other, err_msg=variable.path)


@functools.cache
def on_one_device(program, optimizer="sgd", **more):
    return trained(made(None, getattr(images, program), optimizer), **more)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("program", "axis", "optimizer", "devices", "tensor"),
    [
        ("plain", "height", "sgd", 4, 2),
        pytest.param("plain", "width", "adam", 2, 2, marks=full),
        pytest.param("plain", "height", "clipping", 4, 4, marks=full),
        pytest.param("residual", "height", "adam", 2, 2, marks=full),
        pytest.param("residual", "width", "sgd", 4, 2, marks=full),
        pytest.param("residual", "height", "sgd", 3, 3, marks=full),
        ("unet", "height", "sgd", 2, 2),
        pytest.param("unet", "width", "adam", 4, 2, marks=full),
        ("sequence", "length", "sgd", 2, 2),
        pytest.param("sequence", "length", "adam", 4, 4, marks=full),
        pytest.param("volume", "depth", "sgd", 2, 2, marks=full),
        pytest.param("volume", "height", "adam", 4, 2, marks=full),
        pytest.param("volume", "width", "sgd", 2, 2, marks=full),
        pytest.param("Subclassed", "height", "sgd", 2, 2, marks=full),
        pytest.param("Subclassed", "width", "adam", 4, 2, marks=full),
    ],
)
def test_slices_train_as_one_device(program, axis, optimizer, devices, tensor):
    model = made(cut(axis, devices, tensor), getattr(images, program), optimizer)
    assert_near(trained(model), on_one_device(program, optimizer))
    assert_copies_are_alike(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "words"),
    [
        pytest.param(
            "far", "pool gets whole arrays: 2 indices are too few for 4 replicas", marks=full
        ),
        ("mixed", "lambda gets whole arrays: it reads the output of conv1"),
    ],
)
def test_layers_that_need_whole_arrays_get_them_and_are_told(program, words):
    """A kernel is larger than a slice, an own function turns images over, maps become small."""
    strategy = cut(devices=4, tensor=4)
    expected = on_one_device(program, epochs=1)
    assert_near(trained(made(strategy, getattr(images, program)), epochs=1), expected)
    notes = strategy.layouts().notes
    assert notes[0].startswith("layers that compute with slices of their outputs: conv1, ")
    assert words in notes
    assert str(strategy.layouts()).endswith("\n".join(notes))


@full
@pytest.mark.parametrize("program", ["residual", "unet"])
def test_fifty_steps(program):
    own = {"epochs": 17}
    model = made(cut(), getattr(images, program), "adam")
    assert_near(trained(model, **own), on_one_device(program, "adam", **own))


@pytest.mark.slow
def test_eager_steps():
    own = {"epochs": 1, "rows": 8}
    model = made(cut(), images.residual, run_eagerly=True)
    assert_near(trained(model, **own), on_one_device("residual", **own))


@pytest.mark.slow
def test_several_steps_at_once():
    """Each call of Keras's function makes three steps, in a loop."""
    expected = trained(made(None, images.plain, steps_per_execution=3))
    assert_near(trained(made(cut(), images.plain, steps_per_execution=3)), expected)


@full
def test_mixed_precision_trains():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_bfloat16")
    expected = trained(made(None, images.residual), epochs=1)
    assert_near(trained(made(cut(), images.residual), epochs=1), expected, 0.05)


def test_means_of_float16_do_not_overflow():
    """A slice of the image sums up to 163,840, and the largest number of float16 is 65,504."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    with cut().scope():
        conv = keras.layers.Conv2D(2, 1, kernel_initializer="ones", name="conv")
        model = keras.Sequential([conv, keras.layers.GlobalAveragePooling2D()])
        model.compile("sgd", "mse")
    x = np.full((2, 128, 128, 1), 20.0, np.float32)
    assert model.fit(x, np.ones((2, 2)), verbose=0).history["loss"] == [361.0]


@pytest.mark.slow
def test_a_step_of_a_users_own():
    def result(strategy):
        model = made(strategy, images.OwnStep, loss=None, metrics=None)
        x, y = data(model, 22)
        history = model.fit(x, y, 8, 2, shuffle=False, verbose=0).history
        return [*numbers(model), *map(np.array, history.values())]

    assert_near(result(cut(devices=4)), result(None))


class Adversarial(keras.Model):
    """Model that trains on samples that climb its loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.compute_loss(x, y, self(x, training=True))
        return super().train_step((x + 5 * tape.gradient(loss, x), y))


@pytest.mark.slow
def test_gradients_by_inputs_are_whole():
    def build():
        image = keras.Input((8, 6, 2))
        x = keras.layers.Conv2D(4, 3, padding="same", activation="tanh", name="conv")(image)
        return Adversarial(image, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))

    assert_near(trained(made(cut(), build)), trained(made(None, build)))


@pytest.mark.slow
def test_files_are_those_of_one_device(tmp_path):
    model = made(cut(), images.residual)
    x, y = data(model, 16)

    def goes_on(model):
        model.fit(x, y, 8, verbose=0, shuffle=False)
        return numbers(model)

    goes_on(model)
    model.save(tmp_path / "model.keras")
    saved, expected = numbers(model), goes_on(model)
    for strategy in (None, cut("width", 4, 4)):
        with strategy.scope() if strategy else contextlib.nullcontext():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        for one, other in zip(numbers(loaded), saved, strict=True):
            np.testing.assert_array_equal(one, other)
        assert_near(goes_on(loaded), expected)


def test_halos_alone_travel():
    """Each replica gets one index of height of its neighbour, and sends a gradient of it back."""
    strategy = cut()
    model = made(strategy, images.short)
    x, y = data(model, 8)
    model.fit(x, y, 8, verbose=0)
    sent = collections.Counter()
    for communicator in strategy.teams.tensor.communicators:
        for execution in communicator.log():
            sent[execution.bucket.label] += execution.sent
    halo = 8 * 10 * 4 * 8  # rows, width, channels, bytes of a number
    means = 2 * 8 * 4 * 8
    assert dict(sent) == {
        "halo of conv2": 2 * halo,
        "gradient of halo of conv2": 2 * halo,
        "mean of mean": means,
        "gradient of mean of mean": means,
    }


# ---------------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "optimizer"), [("residual", "adam"), pytest.param("unet", "sgd", marks=full)]
)
def test_slices_of_processes_train_as_on_one_device(tmp_path, program, optimizer):
    expected = on_one_device(program, optimizer)
    path = tmp_path / "model.keras"
    settings = {"BUILD": program, "OPTIMIZER": optimizer, "FILE": str(path)}
    with start("domain.py", "2x1", **settings) as group:
        outputs = group.wait(400)
    for output in outputs:
        (line,) = re.findall(r"^TRAINED (.*)$", output, re.MULTILINE)
        assert_near(list(map(np.array, json.loads(line))), expected)
    found = numbers(keras.models.load_model(path))
    assert_near(found, expected[: len(found)])


@pytest.mark.slow
def test_a_worker_that_was_killed_with_its_slices_is_named():
    with start("domain.py", "2x1", VICTIM="1", DEADLINE=str(PATIENCE)) as group:
        end = time.monotonic() + 300
        while not (found := re.search(r"^ERROR (.*)$", group.output(0), re.MULTILINE)):
            assert time.monotonic() < end, group.output(0)[-3000:]
            time.sleep(0.05)
    assert "rank 1 (worker 1 at 127.0.0.1:" in found[1], found[1]


# ------------------------------------------------------------------------ refusals


def test_shards_and_stages_beside_slices_of_activations_are_refused():
    with pytest.raises(ValueError, match="cuts activations along an axis, and with shard="):
        tfscale.ScaleStrategy(
            grid=tfscale.Grid(tensor=2), tensor={"conv": "height"}, shard="optimizer"
        )
    with pytest.raises(ValueError, match="cuts activations along an axis, and with grid="):
        tfscale.ScaleStrategy(
            grid=tfscale.Grid(tensor=2, stages=2),
            tensor={"conv": "height"},
            pipeline=tfscale.Pipeline(microbatches=2),
        )


@pytest.mark.parametrize(
    ("pattern", "axis", "words"),
    [
        ("conv1", "length", "'length' is for Conv1D"),
        ("dense", "height", "a weight of a Dense, and 'height' is for Conv2D and Conv3D"),
        ("nothing", "height", "the rule 'nothing' of tensor= matches no weight"),
        ("conv", "up", "'height'"),
    ],
)
def test_rules_that_do_not_fit_are_refused(pattern, axis, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        model = made(cut(axis, pattern=pattern), images.short)
        model.fit(*data(model, 8), verbose=0)
