"""The callback in ``fit``: on one device, on two replicas of a process, and in two processes."""

import json
import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests import warm
from tests.adversarial.models import BATCH, ROWS, by_hand, dense, difference, fit, momentum, numbers
from tests.adversarial.workers import train
from tfscale import quantize, schedules
from tfscale.adversarial import FGSM, PGD
from tfscale.callbacks import Adversarial, Recompute, Warmup
from tfscale.optimizers import AdaHessian

ROOT = Path(__file__).parents[2]
FULL = pytest.mark.full
SECONDS = 600  # on the busiest machine
STEPS = -(-ROWS // BATCH)


@pytest.fixture(scope="module")
def strategy():
    return tfscale.ScaleStrategy(algorithm="ring", devices=["CPU:0", "CPU:1"])


def norm_and_dropout():
    keras.utils.set_random_seed(2)
    return keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)


# ---------------------------------------------------------------- one device


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"run_eagerly": True}, marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, marks=FULL),
    ],
    ids=["graph", "eager", "xla"],
)
def test_each_batch_is_moved_and_nothing_else_changes(how):
    """Statistics, seeds and momentum are compared too."""
    model = dense(*norm_and_dropout(), **how)
    fit(model, Adversarial(FGSM(0.1)))
    expected = by_hand(dense(*norm_and_dropout(), **how), 0.1)
    assert difference(model, expected) < 1e-6
    assert difference(model, by_hand(dense(*norm_and_dropout(), **how), 1e-9)) > 1e-3


@pytest.mark.slow
def test_a_share_of_0_is_plain_training_to_the_bit():
    model, plain = dense(*norm_and_dropout()), dense(*norm_and_dropout())
    fit(model, Adversarial(PGD(0.1), share=0))
    fit(plain)
    assert difference(model, plain) == 0


def test_metrics_are_of_the_moved_samples_and_validation_is_not():
    x, y = numbers()
    model, plain = dense(), dense()
    for one, callbacks in ((model, [Adversarial(FGSM(0.5))]), (plain, [])):
        one.optimizer.learning_rate = 0.0
        one.told = fit(one, *callbacks, epochs=1, validation_data=(x, y)).history
    assert model.told["loss"][0] > plain.told["loss"][0]
    assert model.told["val_loss"] == plain.told["val_loss"]


def test_the_next_fit_is_plain_after_a_good_end_and_after_an_error():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise InterruptedError

    model, plain = dense(), dense()
    fit(model, Adversarial(FGSM(0.1)), epochs=1)
    with pytest.raises(InterruptedError):
        fit(model, Adversarial(FGSM(0.1)), Stop())
    with pytest.raises(InterruptedError):
        fit(model, Adversarial(FGSM(0.1)), Stop())
    plain.optimizer.build(plain.trainable_variables)
    plain.set_weights(model.get_weights())
    for mine, other in zip(plain.optimizer.variables, model.optimizer.variables, strict=True):
        mine.assign(other)
    fit(plain, epochs=1)
    fit(model, epochs=1)
    assert difference(model, plain) == 0
    assert "train_step" not in vars(model)


def test_the_next_fit_is_plain_though_a_callback_had_the_step_traced_again():
    model = dense()
    fit(model, Adversarial(FGSM(0.5)), quantize.Prune(0.3, end=2, every=1))
    variables = [*model.weights, *model.optimizer.variables]
    before = [np.array(each) for each in variables]
    fit(model)
    found = model.get_weights()
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    model.make_train_function(force=True)
    fit(model)
    assert all(map(np.array_equal, found, model.get_weights()))


def test_share_and_strength_follow_the_step():
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(adversarial._variables["share"]))

    fading = schedules.Polynomial(0.8, end=2, unit="epochs")
    adversarial = Adversarial(FGSM(0.1), share=fading, strength=lambda step: 1 / (1 + step))
    history = fit(dense(), adversarial, Look()).history
    assert seen == pytest.approx([0.8 * (1 - step / (2 * STEPS)) for step in range(2 * STEPS)])
    assert history["adversarial_epsilon"] == pytest.approx([0.1 / STEPS, 0.1 / (2 * STEPS)])
    assert history["adversarial_share"] == pytest.approx([seen[STEPS - 1], seen[-1]])


def test_a_resumed_training_goes_on(tmp_path):
    class StopBefore(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise InterruptedError

    def callbacks(*more):
        fading = schedules.Polynomial(0.8, end=2, unit="epochs")
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        return [Adversarial(PGD(0.1, steps=2), share=fading), backup, *more]

    with pytest.raises(InterruptedError):
        fit(dense(), *callbacks(StopBefore()))
    resumed, whole = dense(), dense()
    fit(resumed, *callbacks())
    fit(whole, callbacks()[0])
    assert difference(resumed, whole) == 0


@pytest.mark.slow
def test_a_model_that_is_not_built_and_one_that_was_saved(tmp_path):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    fit(model, Adversarial(FGSM(0.1)))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        fit(one, Adversarial(FGSM(0.1)))
    assert difference(model, loaded) < 1e-6


# ------------------------------------------------------------- kinds of models


def two_inputs():
    keras.utils.set_random_seed(1)
    numbers_in = keras.Input((6,), name="numbers")
    word = keras.Input((), dtype="int32", name="word")
    both = keras.layers.Concatenate()([numbers_in, keras.layers.Embedding(5, 3)(word)])
    outputs = {name: keras.layers.Dense(1, name=name)(both) for name in ("a", "b")}
    model = keras.Model({"numbers": numbers_in, "word": word}, outputs)
    model.compile(momentum(), {"a": "mse", "b": "mae"}, metrics={"a": ["mae"]})
    return model


def fit_two(model, *callbacks):
    x, y = numbers()
    words = np.arange(ROWS, dtype=np.int32) % 5
    weights = np.linspace(0, 1, ROWS, dtype=np.float32)
    return model.fit(
        {"numbers": x, "word": words}, {"a": y, "b": 1 - y},
        sample_weight={"a": weights, "b": weights}, batch_size=BATCH, epochs=2,
        shuffle=False, verbose=0, callbacks=list(callbacks),
    )  # fmt: skip


def test_integers_are_refused_by_name():
    with pytest.raises(ValueError, match=r"the input 'word' is int32.*inputs=\[...\] chooses"):
        fit_two(two_inputs(), Adversarial(FGSM(0.1)))
    with pytest.raises(ValueError, match="names 'words', but the model receives 'numbers', 'word'"):
        fit_two(two_inputs(), Adversarial(FGSM(0.1), inputs=["words"]))


def masked_words():
    """Masks, a layer with losses of its own, and a seed that changes outside of training, too."""

    class Noisy(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(7)
            self.supports_masking = True

        def call(self, x):
            self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
            return x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.seeds)

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Masking(), keras.layers.GRU(4, return_sequences=True), Noisy()]
    model = keras.Sequential([keras.Input((6, 1)), *layers, keras.layers.Dense(1)])
    model.compile(momentum(), "mse")
    return model


@pytest.mark.slow
def test_masks_added_losses_and_seeds():
    x, y = numbers()
    x = np.where(np.arange(6) < 1 + np.arange(ROWS)[:, None] % 6, x, 0)[..., None]
    y = np.repeat(y[..., None], 6, axis=1)
    seeds = []
    for callbacks in ([Adversarial(FGSM(0.1))], []):
        model = masked_words()
        model.fit(x, y, BATCH, verbose=0, callbacks=callbacks)
        seeds.append(np.asarray(model.layers[2].seeds.state))
    np.testing.assert_array_equal(*seeds)


@keras.saving.register_keras_serializable("tests")
class OwnStep(keras.Model):
    """A step as keras.io's guide writes it."""

    def __init__(self, **how):
        super().__init__(**how)
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class OwnLoss(OwnStep):
    """Model that computes its loss without Keras; a strategy must weight that loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own(kind):
    keras.utils.set_random_seed(1)
    model = kind()
    model.compile(momentum(), "mse")
    model.build((None, 6))
    return model


def half():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return dense()
    finally:
        keras.config.set_dtype_policy("float32")


MODELS = {
    "norm": lambda: dense(keras.layers.BatchNormalization()),
    "accumulation": lambda: dense(optimizer=momentum(gradient_accumulation_steps=2)),
    "executions": lambda: dense(steps_per_execution=2),
    "adahessian": lambda: dense(optimizer=AdaHessian(0.01)),
    "eager adahessian": lambda: dense(optimizer=AdaHessian(0.01), run_eagerly=True),
    "own step": lambda: own(OwnStep),
    "own loss": lambda: own(OwnLoss),
    "several losses": two_inputs,
}


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "own loss" else pytest.param(kind, marks=FULL) for kind in MODELS],
)
def test_two_replicas_train_as_one_device(strategy, kind):
    with strategy.scope():
        model = MODELS[kind]()
    alone = MODELS[kind]()
    for one in (model, alone):
        if kind == "several losses":
            fit_two(one, Adversarial(PGD(0.1, steps=2), share=0.5, inputs=["numbers"]))
        else:
            fit(one, Adversarial(PGD(0.1, steps=2), share=0.5))
    for mine, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_half_precision_trains():
    model = half()
    loss = fit(model, Adversarial(FGSM(0.1)), epochs=5).history["loss"]
    assert loss[-1] < loss[0]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_two_processes_train_as_one_device():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with warm.Workers([train.__file__], 2, environment={"PYTHONPATH": path}) as group:
        printed = group.wait(SECONDS)
    alone = [train.train(train.model(), attack) for attack in train.ATTACKS]
    for output in printed:
        (found,) = re.findall(r"^TRAINED (.*)$", output, re.MULTILINE)
        for weights, expected in zip(json.loads(found), alone, strict=True):
            for mine, other in zip(weights, expected, strict=True):
                np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6)


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize("first", ["Recompute", "Adversarial"])
def test_recomputation_is_refused(first):
    pair = [Recompute(segments="sqrt", verbose=0), Adversarial(FGSM(0.1))]
    pair = pair if first == "Recompute" else pair[::-1]
    with pytest.raises(ValueError, match="both change the traced step .*Leave one of them out"):
        fit(dense(), *pair)


def test_a_warmup_goes_with_it():
    history = fit(dense(), Adversarial(FGSM(0.1)), Warmup(epochs=2)).history
    assert history["learning_rate"] == pytest.approx([0.05 - 0.01, 0.1 - 0.01])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Adversarial(0.1), "attack is one of tfscale.adversarial.*got 0.1"),
        (
            lambda: Adversarial(FGSM(0.1), share=1.5),
            "share is a number or .*, from 0 to 1; got 1.5",
        ),
        (lambda: Adversarial(FGSM(0.1), strength=-1), "strength is .* 0 or more; got -1"),
        (lambda: Adversarial(FGSM(0.1), inputs="image"), "list of names.*got 'image'"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_share_beyond_1_and_epochs_of_unknown_length_are_refused():
    with pytest.raises(ValueError, match="share is a number or .*, from 0 to 1; got 2"):
        fit(dense(), Adversarial(FGSM(0.1), share=lambda step: 2))
    fading = Adversarial(FGSM(0.1), share=schedules.Polynomial(0.5, end=2, unit="epochs"))
    data = tf.data.Dataset.from_tensor_slices(numbers()).batch(8).filter(lambda x, y: True)
    with pytest.raises(ValueError, match=r"Give fit steps_per_epoch.*Adversarial\(share=...\)"):
        dense().fit(data, verbose=0, callbacks=[fading])
