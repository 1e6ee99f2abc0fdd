"""Recomputation leaves a training the same bits, whatever the layers are."""

import functools

import keras
import pytest

import tfscale
from tests.recompute import models
from tests.recompute.models import again, assert_same_training, chain, images

layers = keras.layers

KINDS = {
    "dense": models.perceptron,
    "dropout": lambda: chain(lambda: layers.Dropout(0.3)),
    "seeded dropout": lambda: chain(lambda: layers.Dropout(0.3, seed=3)),
    "noise": lambda: chain(lambda: layers.GaussianNoise(0.3), lambda: layers.GaussianDropout(0.2)),
    "alpha dropout": lambda: chain(lambda: layers.AlphaDropout(0.2), layers.ELU),
    "spatial dropout": lambda: chain(lambda: layers.SpatialDropout1D(0.3)),
    "batch norm": lambda: chain(layers.BatchNormalization),
    "layer norm": lambda: chain(layers.LayerNormalization),
    "rms, unit norm": lambda: chain(layers.RMSNormalization, layers.UnitNormalization),
    "group norm": lambda: images(lambda: layers.GroupNormalization(2), layers.ReLU),
    "activations": lambda: chain(layers.LeakyReLU, layers.PReLU, layers.Softmax),
    "activity regularizer": lambda: chain(
        lambda: layers.ActivityRegularization(l2=0.1),
        lambda: layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1"),
    ),
    "convolutions": lambda: images(
        lambda: layers.DepthwiseConv2D(3, padding="same", activation="relu"),
        layers.BatchNormalization,
        lambda: layers.SeparableConv2D(4, 3, padding="same", activation="leaky_relu"),
    ),
    "stacked convolutions": lambda: models.convolutions(residual=False),
    "residual convolutions": lambda: models.convolutions(residual=True),
    "excited": models.excited,
    "pooling": lambda: images(
        lambda: layers.MaxPooling2D(2, 1, padding="same"),
        lambda: layers.AveragePooling2D(2, 1, padding="same"),
        lambda: layers.SpatialDropout2D(0.2),
    ),
    "up and down": lambda: images(layers.UpSampling2D, lambda: layers.MaxPooling2D(2)),
    "transposed": lambda: images(
        lambda: layers.Conv2DTranspose(4, 3, padding="same", activation="gelu")
    ),
    "lstm": lambda: chain(lambda: layers.LSTM(8, return_sequences=True, dropout=0.2), depth=2),
    "gru": lambda: chain(lambda: layers.GRU(8, return_sequences=True), depth=2),
    "spectral norm": lambda: chain(lambda: layers.SpectralNormalization(layers.Dense(8))),
    "einsum": lambda: chain(
        lambda: layers.EinsumDense("abc,cd->abd", (None, 8), activation="silu", bias_axes="d")
    ),
    "time distributed": lambda: chain(lambda: layers.TimeDistributed(layers.Dense(8, "tanh"))),
    "embedding, masks": models.masked,
    "transformer": models.transformer,
    "causal attention": lambda: models.transformer(use_causal_mask=True),
    "residual": models.residual,
    "branches": models.branches,
    "shared": models.shared,
    "nested": models.nested,
    "subclassed": models.Subclassed,
    "unseeded noise": lambda: chain(models.Noise),
    "many, of rows": lambda: chain(
        *(layers.ELU, layers.PReLU, layers.LeakyReLU, lambda: layers.AlphaDropout(0.2)),
        *(layers.LayerNormalization, layers.RMSNormalization, layers.UnitNormalization),
        *(lambda: layers.SpatialDropout1D(0.3), lambda: layers.GaussianDropout(0.2)),
        *(lambda: layers.GaussianNoise(0.3), lambda: layers.Dropout(0.3, seed=3)),
        lambda: layers.TimeDistributed(layers.Dense(8, "tanh")),
        depth=2,
    ),
    "many, of images": lambda: images(
        lambda: layers.DepthwiseConv2D(3, padding="same", activation="relu"),
        layers.BatchNormalization,
        lambda: layers.SeparableConv2D(4, 3, padding="same", activation="leaky_relu"),
        lambda: layers.GroupNormalization(2),
        *(layers.UpSampling2D, lambda: layers.MaxPooling2D(2), lambda: layers.ReLU(0.1)),
        lambda: layers.AveragePooling2D(2, 1, padding="same"),
        lambda: layers.SpatialDropout2D(0.2),
        lambda: layers.Conv2DTranspose(4, 3, padding="same", activation="gelu"),
        depth=2,
    ),
}


@functools.cache
def same_training(kind):
    """The plan by which it was the same."""
    return assert_same_training(KINDS[kind])


# One of each kind of graph; the others are slow.
QUICK = ("dropout", "lstm")
SOMETIMES = ("stacked convolutions", "batch norm", "shared")
# By themselves in ``make test-all`` alone: they are among the many of one model, or like another.
ALONE = (
    *("seeded dropout", "noise", "alpha dropout", "spatial dropout", "layer norm"),
    *("rms, unit norm", "group norm", "activations", "convolutions", "pooling", "up and down"),
    *("transposed", "gru", "time distributed", "causal attention"),
    *("spectral norm", "einsum", "residual", "residual convolutions"),
)


def mark(kind):
    return [pytest.mark.full] if kind in ALONE else [] if kind in QUICK else [pytest.mark.slow]


# Random orders train all kinds (test_orders.py): segments are one order of many.
def segments(kind):
    if kind in SOMETIMES:
        return [pytest.mark.slow]
    return [] if kind in QUICK else [pytest.mark.full]


SEGMENTS = [pytest.param(kind, marks=segments(kind)) for kind in KINDS]


@pytest.mark.parametrize("kind", SEGMENTS)
def test_same_bits(kind):
    same_training(kind)


def test_what_draws_without_a_seed_is_kept():
    plan = same_training("unseeded noise")
    drawing = [op for one in plan.again for op in one.ops if "Random" in plan.step.ops[op].kind]
    assert not drawing


def test_random_numbers_are_computed_again_from_their_seed():
    plan = same_training("dropout")
    kinds = {plan.step.ops[op].kind for one in plan.again for op in one.ops}
    assert any(kind.startswith("StatelessRandom") for kind in kinds), kinds
    assert any("dropout" in layer for layer in again(plan))


def test_a_loop_is_computed_again():
    plan = same_training("lstm")
    assert any("While" in plan.step.ops[op].kind for one in plan.again for op in one.ops)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.full)]
)
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    try:
        assert_same_training(models.residual)
    finally:
        keras.config.set_dtype_policy("float32")


SETTINGS = {
    "sgd": {"optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.9)},
    "clipped": {"optimizer": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5)},
    "accumulated": {"optimizer": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)},
    "lars": {"optimizer": lambda: tfscale.optimizers.LARS(0.1)},
    "lamb": {"optimizer": lambda: tfscale.optimizers.LAMB(0.01)},
    "several steps at once": {"steps_per_execution": 2},
}
OFTEN = ("clipped", "several steps at once")  # the others are in ``make test-all`` alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n if n in OFTEN else pytest.param(n, marks=pytest.mark.full) for n in SETTINGS],
)
def test_ways_to_train(name):
    assert_same_training(models.residual, **SETTINGS[name])


@pytest.mark.parametrize(
    "kind",
    [
        "pooling",
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in ("transformer", "dense", "dropout", "residual")
        ),
    ],
)
def test_batches_that_differ_in_size(kind):
    """The optimizer of graphs does not know the size of these batches."""
    assert_same_training(KINDS[kind], batch=7)
