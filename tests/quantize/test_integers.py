"""Whole numbers say what the quantized model says, in all outputs."""

import keras
import numpy as np
import pytest

from tests.covering import cover
from tests.quantize.small_models import NETS, images, kernels, settled
from tfscale import quantize

WIDTHS = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "activations": 4, "symmetric_activations": True, "group": "kernel"},
    "int2": {"bits": 2, "symmetric": False, "ranges": "learned", "group": 3},
}


def without_last_activation(model):
    """Return the outputs that enter a last softmax."""

    def copied(layer):
        config = layer.get_config()
        if layer is model.layers[-1]:
            config["activation"] = "linear"
        return type(layer).from_config(config)

    made = keras.models.clone_model(model, clone_function=copied)
    made.set_weights(model.get_weights())
    return made


GRID = [(name, how, jit) for name in NETS for how in WIDTHS for jit in (False, True)]
SOME = cover(GRID, lambda row: [row[0], row[1], row[1:]])


@pytest.fixture(scope="module")
def nets():
    return {name: settled(build) for name, build in NETS.items()}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "name, how, jit",
    [pytest.param(*row, marks=() if row in SOME else pytest.mark.full) for row in GRID],
)
def test_all_outputs_are_equal(nets, name, how, jit):
    settings = dict(WIDTHS[how])
    x, _ = images()
    small = quantize.apply(nets[name], kernels(nets[name], settings.pop("bits")), x, **settings)
    program = quantize.integers(small)
    twin = without_last_activation(small)
    twin.compile(jit_compile=jit)
    others = 3 * images(300, seed=9)[0]  # also numbers outside of the ranges
    expected = twin.predict(others, verbose=0)
    assert len(np.unique(expected)) > 50
    np.testing.assert_array_equal(program.run(others), expected)


@pytest.mark.slow
def test_all_outputs_are_equal_after_training(nets):
    x, y = images(32)
    small = quantize.apply(nets["plain"], kernels(nets["plain"], 4), x, ranges="learned")
    small.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    small.fit(x, y, verbose=0, epochs=3)
    np.testing.assert_array_equal(quantize.integers(small).run(x), small.predict(x, verbose=0))


def test_a_program_counts_the_bytes_of_its_weights(nets):
    x, _ = images()
    model = nets["plain"]
    eight, four = (
        quantize.integers(quantize.apply(model, kernels(model, bits), x)).bytes for bits in (8, 4)
    )
    numbers, channels = 432 * 32 + 32 * 32 + 32 * 4, 32 + 32 + 4
    assert eight == numbers + 8 * channels and four == numbers // 2 + 8 * channels


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m, x: quantize.apply(m, kernels(m, 8)), "inputs of .* are not quantized"),
        (lambda m, x: quantize.apply(m, {"first": 8, "head": 8}, x), "'second' is Dense"),
        (lambda m, x: quantize.apply(m, {**kernels(m, 8), "head": (8, None)}, x), "not quantized"),
        (lambda m, x: m, "has 0 grids"),
        (lambda m, x: None, "model is a Keras model"),
    ],
)
def test_errors_say_what_to_do(nets, change, words):
    model = change(nets["plain"], images()[0])
    with pytest.raises(ValueError, match=words):
        quantize.integers(model)


def test_sums_that_exceed_32_bits_are_refused():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([70_000]), keras.layers.Dense(1, name="wide")])
    model.layers[0].kernel.assign(np.ones((70_000, 1)))
    x = np.ones((2, 70_000), "float32")
    small = quantize.apply(model, {"wide": 8}, x, ranges="minmax")
    with pytest.raises(ValueError, match=r"sums of 'wide' reach 2,2\d\d,\d\d\d,\d\d\d"):
        quantize.integers(small)


def test_inputs_are_counted(nets):
    model, (x, _) = nets["plain"], images()
    program = quantize.integers(quantize.apply(model, kernels(model, 8), x))
    with pytest.raises(ValueError, match="1 arrays of inputs"):
        program.run([x, x])


def test_other_types_are_refused():
    half = keras.Sequential(
        [keras.Input([6]), keras.layers.Dense(4, dtype="mixed_bfloat16", name="half"),
         keras.layers.Dense(2, name="last")]
    )  # fmt: skip
    small = quantize.apply(half, {"half": 8, "last": 8}, np.ones((4, 6), "float32"))
    with pytest.raises(ValueError, match="computes 'half' in bfloat16, .* policy float32"):
        quantize.integers(small)


def numbers_of(model, kinds, rows=None):
    """Return what integers and the quantized model say; ``kinds`` names the quantized layers."""
    shape = tuple(model.inputs[0].shape)[1:]
    x = np.random.default_rng(0).standard_normal((48, *shape)) if rows is None else rows
    small = quantize.apply(model, dict.fromkeys(kinds, 8), x.astype("float32"))
    return quantize.integers(small).run(x), small.predict(x.astype("float32"), verbose=0)


def test_a_flattening_that_takes_channels_from_the_front():
    flatten = keras.layers.Flatten(data_format="channels_first")
    parts = [keras.Input([3, 4]), keras.layers.Dense(5, "relu", name="one"), flatten]
    model = keras.Sequential([*parts, keras.layers.Dense(2, name="two")])
    np.testing.assert_array_equal(*numbers_of(model, ["one", "two"]))


def test_sums_of_arrays_that_are_repeated_and_those_of_other_numbers_of_axes():
    def model(keepdims):
        x = inputs = keras.Input([8, 8, 3])
        x = keras.layers.Conv2D(4, 3, activation="relu", name="one")(x)
        mean = keras.layers.GlobalAveragePooling2D(keepdims=keepdims)(x)
        x = keras.layers.Flatten()(keras.layers.Add()([x, mean]))
        return keras.Model(inputs, keras.layers.Dense(2, name="two")(x))

    np.testing.assert_array_equal(*numbers_of(model(True), ["one", "two"]))
    small = keras.Input([4])
    one = keras.layers.Dense(4, name="one")
    with pytest.raises(ValueError, match="a sum of arrays with different numbers of axes"):
        inputs = keras.Input([5, 4])
        summed = keras.layers.Add()([one(inputs), one(small)])
        mixed = quantize.apply(
            keras.Model([inputs, small], summed), {"one": 8}, [np.ones((2, 5, 4)), np.ones((2, 4))]
        )
        quantize.integers(mixed)


def test_numbers_of_float64_enter_as_those_of_float32():
    model = keras.Sequential([keras.Input([784]), keras.layers.Dense(8, name="one")])
    rows = np.random.default_rng(0).uniform(0, 1, (1000, 784))
    np.testing.assert_array_equal(*numbers_of(model, ["one"], rows))
