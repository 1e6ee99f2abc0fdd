"""Lists of exclusions: what they find, that they are kept, and what is said of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.optimizers.common import at
from tfscale.optimizers import BIAS_AND_NORM, LAMB, LARS
from tfscale.training.optimizers.base import ADAPTATION, DECAY
from tfscale.training.optimizers.paths import found

LAYERS = {
    "Dense": lambda: layers.Dense(3),
    "Conv1D": lambda: layers.Conv1D(3, 1),
    "LSTM": lambda: layers.LSTM(3),
    "MultiHeadAttention": lambda: layers.MultiHeadAttention(2, 3),
    "LayerNormalization": lambda: layers.LayerNormalization(),
    "BatchNormalization": lambda: layers.BatchNormalization(),
    "GroupNormalization": lambda: layers.GroupNormalization(1),
    "RMSNormalization": lambda: layers.RMSNormalization(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_default_finds_all_biases_and_norms_and_nothing_else(name):
    """Keras gives one dimension to these and to no others, but for an attention's biases."""
    inputs, layer = keras.Input([4, 5]), LAYERS[name]()
    layer(inputs, inputs) if name == "MultiHeadAttention" else layer(inputs)
    assert layer.trainable_weights
    for weight in layer.trainable_weights:
        small = len(weight.shape) == 1 or weight.path.endswith("bias")
        assert found(BIAS_AND_NORM, weight.path) is small, weight.path


def moved(optimizer, names=("a/kernel", "a/bias", "b/kernel")):
    """Return how far vectors of these names move in a step, as shares of the learning rate."""
    vectors = [at(name, np.full(4, 10.0)) for name in names]
    optimizer.apply([tf.ones(4)] * len(names), vectors)
    return [float(10 - v[0]) / 0.1 for v in vectors]


# With u = 1 + decay * 10 the ratio is 20 / |u| = 10 / u.
@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({}, [10, 1, 10]),
        ({ADAPTATION: ()}, [10, 10, 10]),
        ({DECAY: ()}, [10, 6, 10]),
        ({ADAPTATION: ["^a/"]}, [6, 1, 10]),
        ({ADAPTATION: ["kernel"], DECAY: ["b/"]}, [6, 10, 1]),
        ({ADAPTATION: "kernel", DECAY: None}, [6, 10, 6]),
    ],
    ids=str,
)
def test_the_lists_are_independent(lists, expected):
    optimizer = LAMB(0.1, epsilon=0.0, weight_decay=0.5, **lists)
    np.testing.assert_allclose(moved(optimizer), expected, rtol=1e-5)


def test_keras_way_to_exclude_replaces_the_list_and_is_saved():
    optimizer = LAMB(0.1, epsilon=0.0, weight_decay=0.5, exclude_from_adaptation=["a|b"])
    optimizer.exclude_from_weight_decay(var_list=[at("b/kernel", 1.0)], var_names=["a/k"])
    again = LAMB.from_config(optimizer.get_config())
    for each in (optimizer, again):
        np.testing.assert_allclose(moved(each), [1, 6, 1], rtol=1e-5)
    with pytest.raises(ValueError, match="after the optimizer was built for 3 variables"):
        optimizer.exclude_from_weight_decay(var_names=["a"])


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_a_pattern_that_finds_nothing_is_told_once(kind, caplog):
    optimizer = kind(exclude_from_adaptation=["layer_norm", "bias"])
    moved(optimizer)
    (one,) = caplog.records
    assert one.levelname == "WARNING"
    assert one.getMessage() == (
        "exclude_from_adaptation: 'layer_norm' is found in no variable's path; "
        "paths are a/kernel, a/bias, b/kernel"
    )


def test_the_default_lists_may_find_nothing(caplog):
    moved(LAMB(), ("kernel",))
    assert not caplog.records


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="need Keras's TensorFlow backend, and this is 'jax'"):
        LAMB()
