"""Weights in parts, with the numbers and the files of one device.

Parts are equal shares (``shard="all"``), or slices that the replicas of a team hold. In the cases
of the table no layer knows of parts: each reads whole weights.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import tfscale
from tests.strategy.cases import BY_NAME
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, take, trained_once

pytestmark = pytest.mark.timeout(2 * SECONDS + 60)

QUICK = {
    ("all", "1x2"): (
        *("adamw", "global_clipnorm", "accumulate_and_clip", "ema_overwrite", "embedding_adam"),
        "masked_lstm",
    ),
    ("all", "2x1"): ("adam",),
    ("grid", "1x2"): ("batch_norm", "global_clipnorm", "embedding_adam", "last_batch_of_1"),
    ("grid", "2x2"): ("adam",),
}


# Refused: optimizers that are not known to update each number by itself, and constraints; masks of
# pruned weights are constraints.
NEED_WHOLE_WEIGHTS = ("lamb", "lars", "adahessian", "constraint", "pruned")
# Refused with shard="all": rows of a table in a step of one's own; a test below shows it.
NEED_WHOLE_ROWS = ("own_step_masked", "own_step_clips", "own_step_decays")


def pairs():
    for strategy in ("all", "grid"):
        for layout in ("1x2", "1x4", "2x1", "2x2"):
            quick = QUICK.get((strategy, layout), ())
            for name, case in BY_NAME.items():
                refused = name.startswith(NEED_WHOLE_WEIGHTS)
                refused = refused or (strategy == "all" and name.startswith(NEED_WHOLE_ROWS))
                if layout in case.layouts and not refused:
                    marks = [] if name in quick else pytest.mark.full
                    yield pytest.param(strategy, layout, name, marks=marks)


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, "exact.py", BY_NAME, ("1x2", "1x4", "2x1", "2x2"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("strategy", "layout", "case"), list(pairs()))
def test_weights_in_parts_train_as_one_device(trained, strategy, layout, case):
    (expected,) = trained("none", "1x1")[case]
    judge(
        functools.partial(check, BY_NAME[case], expected),
        trained(strategy, layout)[case],
        lambda: take("exact.py", strategy, layout, [case])[case],
    )


# ------------------------------------------------------------------- rows of a team


@pytest.mark.slow
@pytest.mark.parametrize("case", ["arrays", "dataset"])
def test_workers_of_a_team_train_on_the_same_rows(case):
    """Keras shuffles by default, in each process in another order."""
    one, other = take("shuffled.py", "grid", "2x1", [case])[case]
    assert "error" not in one, one
    assert one["seen"] == other["seen"] and len(one["seen"]) >= 6
    whole = {number for rows in one["seen"][:3] for number in rows}
    assert whole == set(range(0, 48, 4)), "each row once in an epoch"
    assert one["kernel"] == other["kernel"]


# --------------------------------------------------------------------- shard="all"


def model_of(strategy, optimizer=optimizers.Adam, **more):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        words = keras.Input((5,), dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(50, 30)(words))
        x = keras.layers.Dense(13, "tanh", **more)(x)
        model = keras.Model(words, keras.layers.Dense(3)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss)
    return model


def shared(devices, **settings):
    names = [f"CPU:{place}" for place in range(devices)]
    return tfscale.ScaleStrategy("ring", devices=names, shard="all", **settings)


def fit(model):
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 50, (50, 5)), draw.integers(0, 3, 50)
    model.fit(x, y, 20, 2, verbose=0, shuffle=False)


def numbers(model):
    return [np.array(v.numpy()) for v in (*model.weights, *model.optimizer.variables)]


def test_files_and_layouts_of_parts(tmp_path):
    strategy = shared(3)
    model = model_of(strategy)
    fit(model)
    table = strategy.layouts()
    embeddings, _, bias = [row.weight[0] for row in table][:3]
    assert embeddings.held(0) == 500
    assert bias.held(2) == 13, "small weights are copies"
    assert "weights are shared out" in str(table)
    model.save(tmp_path / "model.keras")
    saved = numbers(model)
    fit(model)
    expected = numbers(model)
    for other in (None, shared(2)):
        with other.scope() if other else contextlib.nullcontext():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        for one, whole in zip(numbers(loaded), saved, strict=True):
            np.testing.assert_array_equal(one, whole)
        fit(loaded)
        for one, whole in zip(numbers(loaded), expected, strict=True):
            np.testing.assert_allclose(one, whole, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer, more, words",
    [
        (optimizers.Lamb, {}, "Lamb may need all numbers of a weight"),
        (optimizers.SGD, {"kernel_constraint": "max_norm"}, "the constraint MaxNorm"),
    ],
)
def test_what_needs_whole_weights_is_refused(optimizer, more, words):
    with pytest.raises(ValueError, match=words):
        fit(model_of(shared(2), optimizer, **more))


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


def test_rows_of_a_table_are_refused_in_a_step_of_ones_own():
    strategy = shared(2)
    with strategy.scope():
        plain = model_of(None)
        model = OwnStep(plain.inputs, plain.outputs)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match=r"embeddings is sparse.*shard='optimizer'"):
        fit(model)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"wire": "int8"}, "as fp32"),
        ({"sync": tfscale.sync.LocalSGD(every=2)}, "each replica trains with its own state"),
    ],
)
def test_arguments_that_need_whole_sums_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        shared(2, **settings)
