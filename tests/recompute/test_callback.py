"""The callback in ``fit``: what it promises, refuses and leaves behind."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import mirrored

import tfscale
from tests.recompute import models
from tests.recompute.models import assert_same_training, data, residual, train
from tfscale import quantize
from tfscale.callbacks import Recompute
from tfscale.recompute import BudgetError, recomputing
from tfscale.support.sizes import number_of_bytes


def compiled(build=residual, **settings):
    keras.utils.set_random_seed(1)
    model = build()
    model.compile("sgd", "mse", **settings)
    return model


def fit(model, callback, **settings):
    x, y = data(model)
    return model.fit(x, y, 8, verbose=0, callbacks=[callback], **settings)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({}, "exactly one of budget, fraction, layers, segments and plan.*got budget=None"),
        ({"fraction": 0.5, "budget": 1}, "got budget=1, fraction=0.5"),
        ({"fraction": 1.5}, "fraction is .*more than 0 and at most 1.*; got 1.5"),
        ({"budget": "much"}, "budget is a number of bytes, .*'25MB'.*; got 'much'"),
        ({"budget": -1}, "got -1"),
        ({"layers": "dense"}, "list of names of layers; got 'dense'"),
        ({"segments": 4}, "segments is 'sqrt'; got 4"),
        ({"fraction": 0.5, "solver": "best"}, "solver is 'auto', .*got 'best'"),
        ({"fraction": 0.5, "seconds": 0}, "seconds is .*got 0"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Recompute(**wrong)


@pytest.mark.parametrize(
    "settings, message",
    [({"run_eagerly": True}, "run_eagerly=False"), ({"jit_compile": True}, "jit_compile=False")],
)
def test_what_it_cannot_change_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(compiled(**settings), Recompute(fraction=0.5))


def test_second_derivatives_are_refused():
    model = residual()
    model.compile(tfscale.optimizers.AdaHessian(0.1), "mse")
    with pytest.raises(ValueError, match="saves nothing under AdaHessian"):
        fit(model, Recompute(fraction=0.5))


def test_a_budget_is_kept_or_refused_with_the_smallest_that_can_be():
    with pytest.raises(BudgetError, match="Ask for at least") as refusal:
        fit(compiled(), Recompute(budget=100))
    smallest = str(refusal.value).split("fraction=")[1].split(")")[0]
    callback = Recompute(fraction=float(smallest), verbose=0)
    fit(compiled(), callback)
    assert callback.plan.again
    assert callback.plan.bound <= float(smallest) * callback.plan.plain_bound


def test_the_numbers_that_a_refusal_names_are_enough():
    smallest, plain = 12_340_001, 20_000_000
    asked = re.search(r"at least (.* MB) \(fraction=(.*)\)", str(BudgetError(1, smallest, plain)))
    assert smallest <= number_of_bytes(asked[1], "budget") < 1.01 * smallest
    assert smallest <= float(asked[2]) * plain < 1.01 * smallest


def test_a_refusal_does_not_promise_what_saves_nothing():
    words = str(BudgetError(8_200, smallest=13_640, plain=13_645))
    assert "a step takes up to 13.7 kB, and moderate recomputation cannot reduce that" in words
    assert "at least 13.7 kB (fraction=1.00), or use smaller batches" in words


def test_a_plan_of_a_model_with_as_much_memory_is_refused(tmp_path):
    """A reshaped tensor stays where it is."""

    def build(*kinds):
        return lambda: models.chain(*kinds, depth=2)

    callback = Recompute(segments="sqrt", verbose=0)
    fit(compiled(build()), callback)
    callback.plan.save(tmp_path / "plan.json")
    fit(compiled(build()), Recompute(plan=tmp_path / "plan.json", verbose=0))
    other = build(lambda: keras.layers.Reshape((6, 8)))
    of_other = Recompute(segments="sqrt", verbose=0)
    fit(compiled(other), of_other)
    assert of_other.plan.plain_peak == callback.plan.plain_peak
    with pytest.raises(ValueError, match="plan again for this model and batch"):
        fit(compiled(other), Recompute(plan=tmp_path / "plan.json", verbose=0))


def test_an_unknown_layer_is_refused():
    with pytest.raises(ValueError, match="no layer named 'nobody'"):
        fit(compiled(), Recompute(layers=["nobody"]))


@pytest.mark.slow
def test_layers_of_a_subclassed_model():
    names = [block.name for block in models.Subclassed().blocks]
    keras.utils.clear_session(free_memory=False)
    callback = Recompute(layers=[names[0].rsplit("_", 1)[0]], verbose=0)
    plan = assert_same_training(models.Subclassed, callback)
    assert "block" in models.again(plan)
    assert "block_1" not in models.again(plan)


@pytest.mark.slow
def test_a_model_whose_layers_make_layers_when_they_are_called():
    """Keras builds a subclassed model in its first step, so the first trace makes these layers."""

    class Attends(keras.Model):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(2, 4)
            self.rest = keras.Sequential([keras.layers.Dense(8, "gelu"), keras.layers.Dense(1)])

        def call(self, x):
            return self.rest(keras.ops.mean(x + self.attention(x, x), axis=1))

    assert_same_training(Attends)


def test_a_model_that_its_first_batch_builds():
    def build():
        hidden = [keras.layers.Dense(8, "gelu") for _ in range(3)]
        return keras.Sequential([*hidden, keras.layers.Flatten(), keras.layers.Dense(1)])

    assert_same_training(build)


def test_the_summary_is_printed_before_training(capsys):
    fit(compiled(), Recompute(segments="sqrt"))
    printed = capsys.readouterr().out
    assert printed.startswith("Recompute: tracing a training step of functional")
    assert re.search(r"Recompute: planning \d+ units, \d+ operations\n", printed)
    assert "a step takes up to" in printed
    assert "again, segment 1" in printed


@pytest.mark.slow
def test_a_long_search_tells_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr("tfscale.callbacks.recompute.SECONDS_BETWEEN_LINES", -1)
    fit(compiled(), Recompute(fraction=0.9))
    told = re.findall(r"Recompute: planning, (\d) of 8 plans made\n", capsys.readouterr().out)
    assert told == [str(done) for done in range(8)]


@pytest.mark.slow
def test_nothing_stays_behind(tmp_path):
    model = compiled()
    x, y = data(model)

    def train_and_save(*callbacks):
        saving = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras", save_freq=1)
        settings = {"verbose": 0, "validation_data": (x, y), "callbacks": [*callbacks, saving]}
        model.fit(x, y, 8, **settings)
        return model.train_function, snapshot(model)

    before = train_and_save()
    assert train_and_save(Recompute(segments="sqrt", verbose=0)) == before
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def snapshot(model):
    """The names of what each object holds."""
    objects = [model, model.optimizer, *model._flatten_layers(), *model.operations]
    return [sorted(vars(one)) for one in objects]


def test_a_fit_that_failed_does_not_reach_into_the_next():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = compiled()
    x, y = data(model)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, 8, verbose=0, callbacks=[Recompute(segments="sqrt", verbose=0), Fails()])
    left = model.train_function
    model.fit(x, y, 8, verbose=0)
    assert model.train_function is not left


def test_who_traces_the_step_again_keeps_recomputation(monkeypatch):
    """A callback behind it asks for a new step, as pruning does, which gives weights masks."""
    steps = []

    def counted(*given):
        steps.append(given)
        return recomputing(*given)

    monkeypatch.setattr("tfscale.callbacks.recompute.recomputing", counted)

    def result(*callbacks):
        model = compiled()
        prune = quantize.Prune(0.5, end=4, every=1)
        x, y = data(model)
        model.fit(x, y, 8, verbose=0, shuffle=False, callbacks=[*callbacks, prune])
        return model

    expected, found = result(), result(Recompute(segments="sqrt", verbose=0))
    assert len(steps) == int(found.optimizer.iterations)
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    x, y = data(found)
    found.fit(x, y, 8, verbose=0)
    assert len(steps) < int(found.optimizer.iterations)


@pytest.mark.slow
def test_data_of_unknown_shape_needs_an_example():
    model = compiled()
    x, y = data(model)

    def batches():
        while True:
            yield x[:8], y[:8]

    specs = (tf.TensorSpec((None, 6, 8)), tf.TensorSpec((None, 1)))
    unknown = tf.data.Dataset.from_generator(batches, output_signature=specs)
    with pytest.raises(ValueError, match=r"Recompute\(..., example=\(x, y\)\)"):
        model.fit(unknown, steps_per_epoch=2, verbose=0, callbacks=[Recompute(fraction=0.9)])
    with pytest.raises(ValueError, match="example has the structure.*batch of this fit is"):
        three = Recompute(segments="sqrt", example=(x[:8], y[:8], y[:8]), verbose=0)
        model.fit(unknown, steps_per_epoch=2, verbose=0, callbacks=[three])
    recompute = Recompute(segments="sqrt", example=(x[:8], y[:8]), verbose=0)
    model.fit(unknown, steps_per_epoch=2, verbose=0, callbacks=[recompute])
    known = Recompute(segments="sqrt", verbose=0)
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), verbose=0, callbacks=[known])
    assert recompute.plan.plain_peak == known.plan.plain_peak


def test_sizes_that_depend_on_the_data_are_refused_where_a_budget_is_to_be_kept():
    model = compiled(lambda: models.chain(models.Picks, depth=1))
    with pytest.raises(ValueError, match=r"'.*picks.*' and \d+ more .* example=\(x, y\)"):
        fit(model, Recompute(fraction=0.9))
    fit(model, Recompute(layers=["picks"], verbose=0))


@pytest.mark.slow
def test_what_a_loop_keeps_for_its_gradient_is_counted():
    plans = []
    for length in (6, 12):
        keras.utils.clear_session(free_memory=False)
        inputs = keras.Input((length, 8))
        x = keras.layers.LSTM(8, return_sequences=True)(inputs)
        model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x))
        model.compile("sgd", "mse")
        callback = Recompute(fraction=1.0, verbose=0)
        model.fit(np.ones((8, length, 8)), np.ones((8, 8)), 8, verbose=0, callbacks=[callback])
        plans.append(callback.plan)
    state = 8 * 8 * 4
    more = plans[1].plain_peak - plans[0].plain_peak
    assert more > 6 * 10 * state  # four gates, what they are made of, and two states
    assert not plans[0].step.unknown


def test_columns_of_images_are_counted_without_onednn(monkeypatch):
    peaks = []
    for has in (True, False):
        monkeypatch.setattr("tfscale.training.recompute.read.uses_onednn", lambda has=has: has)
        callback = Recompute(segments="sqrt", verbose=0)
        fit(compiled(lambda: models.convolutions(residual=False)), callback)
        peaks.append(callback.plan.plain_peak)
    images, places, row = 8, 8 * 8, 3 * 3 * 4 * 4
    assert peaks[1] - peaks[0] == pytest.approx(2 * images * places * row, rel=0.01)


def test_a_step_without_apply_gradients_is_refused():
    class Own(keras.Model):
        def train_step(self, batch):
            return {"loss": keras.ops.mean(self(batch[0], training=True))}

    inputs = keras.Input((6, 8))
    outputs = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(1)(inputs))
    with pytest.raises(ValueError, match="passed no gradients to an optimizer"):
        fit(compiled(lambda: Own(inputs, outputs)), Recompute(fraction=0.5))


STRATEGIES = {
    "mirrored": mirrored,
    "scale": lambda: tfscale.ScaleStrategy(devices=["CPU:0", "CPU:1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scale", pytest.param("mirrored", marks=pytest.mark.full)])
def test_two_replicas(kind):
    """Each computes its own again."""
    plain, losses = train(residual, scope=STRATEGIES[kind](), optimizer="sgd")
    callback = Recompute(segments="sqrt", verbose=0)
    ours, our_losses = train(residual, callback, scope=STRATEGIES[kind](), optimizer="sgd")
    assert callback.plan.again
    assert losses == our_losses
    for name, value in plain.items():
        assert value.tobytes() == ours[name].tobytes(), name


class MadeInItsStep(keras.Model):
    """A model without a ``call``, whose layers make their weights in its first step."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(8, "relu") for _ in range(4)])

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.inner(batch[0], training=True) ** 2)
        weights = self.inner.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


@pytest.mark.slow
def test_weights_that_only_a_step_can_initialize_must_be_there():
    x = np.ones((16, 8), "float32")
    with STRATEGIES["scale"]().scope():
        model = MadeInItsStep()
        model.compile("sgd")
        callback = Recompute(segments="sqrt", verbose=0)
        with pytest.raises(ValueError, match="call the model's layers once on a batch"):
            model.fit(x, x, 8, verbose=0, callbacks=[callback])
        model = MadeInItsStep()
        model.compile("sgd")
        model.inner(x[:1])
    model.fit(x, x, 8, verbose=0, callbacks=[callback])
    assert callback.plan.again
