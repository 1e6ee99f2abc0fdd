"""Plans that other tools carry out: Keras's own quantize, and files of LiteRT."""

import importlib.util
import logging

import keras
import numpy as np
import pytest
from keras import layers

from tests.quantize.small_models import compiled, images, transformer, words
from tfscale import quantize
from tfscale.analysis.quantize.unquantized import unquantized

needs_litert = pytest.mark.skipif(
    importlib.util.find_spec("ai_edge_quantizer") is None
    or importlib.util.find_spec("ai_edge_litert") is None,
    reason="ai-edge-quantizer or ai-edge-litert is not installed: pip install '.[litert]'",
)


def planned(model, x, y, bits):
    """Return a plan with these bits, by the path of the layer, or the same for all."""
    widths = (2, 3, 4, 8)
    study = quantize.sensitivity(
        model, x, y, by="error", bits=widths, trained=True, batch_size=len(x)
    )
    paths = [layer.path for layer in study.layers]
    each = bits if isinstance(bits, dict) else dict.fromkeys(paths, bits)
    return quantize.plan(study, size="100%", pinned=each)


def convolutions():
    first = keras.Input([12, 12, 3])
    x = layers.Conv2D(8, 3, padding="same", use_bias=False, name="stem")(first)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    y = layers.Conv2D(8, 3, padding="same", activation="relu", name="branch")(x)
    x = layers.Add()([x, y])
    x = layers.DepthwiseConv2D(3, strides=2, activation="relu", name="depthwise")(x)
    x = layers.Conv2DTranspose(8, 2, strides=2, activation="relu", name="up")(x)
    x = layers.Flatten()(x)
    x = layers.Dense(32, "relu", name="hidden")(x)
    return keras.Model(first, layers.Dense(4, name="head")(x))


@pytest.fixture(scope="module")
def trained():
    keras.utils.set_random_seed(0)
    x, y = images(2000)
    model = compiled(convolutions())
    model.fit(x, y, epochs=3, verbose=0)
    return model, x, y


# ---------------------------------------------------------------------- Keras's own layers again


@pytest.mark.slow
def test_rounded_weights_in_plain_layers_answer_as_the_quantized_model(trained):
    model, x, _ = trained
    small = quantize.apply(model, {"stem": 4, "depthwise": 8, "up": 3, "hidden": 2})
    plain = unquantized(small)
    assert not any("Quantized" in type(layer).__name__ for layer in plain.layers)
    np.testing.assert_allclose(plain(x), small(x), 1e-4, 1e-5)


# ---------------------------------------------------------------------- model.quantize


def test_keras_quantizes_each_width_of_the_plan(caplog):
    keras.utils.set_random_seed(0)
    model, (x, y) = compiled(transformer()), words()
    plan = planned(
        model, x, y,
        {"words": 8, "mha/query": 4, "mha/key": 8, "mha/value": 2, "mha/attention_output": 32,
         "head": 4},
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "tfscale"):
        made = plan.to_keras(model)
    mha = made.get_layer("mha")
    found = {
        "words": made.get_layer("words"), "head": made.get_layer("head"),
        "query": mha.query_dense, "key": mha.key_dense, "value": mha.value_dense,
        "output": mha.output_dense,
    }  # fmt: skip
    assert {name: layer.quantization_mode for name, layer in found.items()} == {
        "words": "int8", "head": "int4", "query": "int4", "key": "int8", "value": None,
        "output": None,
    }  # fmt: skip
    assert "'mha/value' (EinsumDense, 2 bits): they stay in float" in caplog.text
    expected = np.asarray(model(x))
    assert 0 < np.abs(np.asarray(made(x)) - expected).max() < 0.3 * np.abs(expected).max()
    with pytest.raises(quantize.NotExportableError, match=r"pinned=\{'mha/value': 32\}") as error:
        plan.to_keras(model, strict=True)
    assert error.value.nearest == {"mha/value": 32}


# ---------------------------------------------------------------------- LiteRT


def test_widths_that_litert_does_not_have_are_refused_with_the_nearest_plan(trained, tmp_path):
    model, x, y = trained
    plan = planned(model, x, y, {"depthwise": 4, "up": 2, "branch": 3, "hidden": 4})
    with pytest.raises(quantize.NotExportableError, match="'depthwise' .DepthwiseConv2D, 4 bits"):
        plan.to_litert(tmp_path / "small.tflite", model)
    with pytest.raises(quantize.NotExportableError) as error:
        plan.to_litert(tmp_path / "small.tflite", model)
    assert error.value.nearest == {"depthwise": 8, "up": 8, "branch": 4}
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_of_another_plan_is_refused(trained, tmp_path):
    model, x, y = trained
    small = quantize.apply(model, planned(model, x, y, 4))
    plan = planned(model, x, y, 8)
    with pytest.raises(
        ImportError if needs_litert.args[0] else ValueError,
        match="pip install" if needs_litert.args[0] else "'stem' has 4 bits, in this plan 8",
    ):
        plan.to_litert(tmp_path / "small.tflite", small)


@needs_litert
def test_a_file_of_litert_holds_the_plan_and_gives_the_same_answers(trained, tmp_path):
    model, x, y = trained
    bits = {"stem": 8, "branch": 4, "depthwise": 8, "up": 8, "hidden": 2, "head": 32}
    plan = planned(model, x, y, bits)
    small = compiled(quantize.apply(model, plan))
    small.fit(x, y, verbose=0)
    for one in (model, small):
        path = tmp_path / f"{one is small}.tflite"
        found = plan.to_litert(path, one, x)
        assert abs(found.weights - plan.bytes) <= 0.02 * plan.bytes
        assert found.same >= 0.995 and found.samples == 2000
        assert path.stat().st_size == found.size
    assert "the same answer for" in str(found)


@needs_litert
def test_other_layers_can_be_exported(tmp_path):
    keras.utils.set_random_seed(0)
    first = keras.Input([12, 12, 3])
    x = layers.SeparableConv2D(8, 3, activation="relu", name="separable")(first)
    x = layers.Reshape([100, 8])(x)
    x = layers.Conv1D(8, 3, activation="relu", name="conv1d")(x)
    x = layers.Dense(8, "relu", name="each")(x)
    model = compiled(keras.Model(first, layers.Dense(4, name="head")(layers.Flatten()(x))))
    x, y = images(64)
    plan = planned(model, x, y, {"separable": 8, "conv1d": 4, "each": 4, "head": 8})
    found = plan.to_litert(tmp_path / "small.tflite", model)
    assert abs(found.weights - plan.bytes) <= 0.02 * plan.bytes


def test_layers_that_litert_does_not_know_are_refused(tmp_path):
    model, (x, y) = compiled(transformer()), words()
    with pytest.raises(quantize.NotExportableError, match="'words' .Embedding, 8 bits"):
        planned(model, x, y, 8).to_litert(tmp_path / "small.tflite", model)
