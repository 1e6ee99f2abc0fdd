"""``weights_wire="bf16"``: replicas compute with rounded weights, and update exact ones.

The oracle is one device whose step computes with rounded weights and applies its gradients to exact
ones. In these programs no exact weight comes so near to the middle between two numbers of bfloat16
that the order of sums decides which it is rounded to: that would show as 1e-5 (it does with
SGD(0.1, momentum=0.9), where 0.04333496 is such a middle after two steps).
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import tfscale
from tests.strategy.cases import BY_NAME
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, chosen, judge, take
from tfscale.optimizers import LAMB
from tfscale.strategy.shards.rounded import Rounded

pytestmark = pytest.mark.timeout(2 * SECONDS + 60)

DRAW = np.random.default_rng(0)
X = DRAW.standard_normal((90, 40)).astype("f4")
Y = X[:, :5].copy()


def strategy(devices=2, **settings):
    names = [f"CPU:{place}" for place in range(devices)]
    settings = {"algorithm": "ring", "shard": "optimizer", "weights_wire": "bf16", **settings}
    return tfscale.ScaleStrategy(devices=names, **settings)


def rounded(x):
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)


class Oracle(keras.Model):
    def train_step(self, data):
        kernels = [v for v in self.trainable_variables if len(v.shape) > 1 and not v.constraint]
        kernels = [v for v in kernels if np.prod(v.shape) >= 1024]
        exact = [tf.identity(v.value) for v in kernels]
        for variable, value in zip(kernels, exact, strict=True):
            variable.assign(rounded(value))
        apply = self.optimizer.apply

        def apply_to_exact(grads, variables=None):
            with tf.control_dependencies([tf.convert_to_tensor(grad) for grad in grads]):
                values = [tf.identity(value) for value in exact]
            for variable, value in zip(kernels, values, strict=True):
                variable.assign(value)
            return apply(grads, variables)

        self.optimizer.apply = apply_to_exact
        try:
            return super().train_step(data)
        finally:
            del self.optimizer.apply


class Tied(layers.Layer):
    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(50, 40)

    def call(self, x):
        hidden = tf.reduce_mean(self.table(tf.cast(tf.abs(x) * 10, tf.int32)), 1)
        return tf.matmul(hidden, tf.convert_to_tensor(self.table.embeddings), transpose_b=True)


def made(within, make, constraint=None, first=None, kind=None, **compiled):
    keras.utils.set_random_seed(1)
    with within.scope() if within else contextlib.nullcontext():
        x = keras.Input((40,))
        h = layers.Dense(64, "tanh", kernel_constraint=constraint)(first()(x) if first else x)
        h = layers.Dense(32, "relu")(layers.BatchNormalization()(h))
        model = (kind or (keras.Model if within else Oracle))(x, layers.Dense(5)(h))
        model.compile(make(), "mse", **compiled)
    return model


def fit(model, epochs=2, callbacks=()):
    model.fit(X, Y, 32, epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


def numbers(model):
    return [np.array(v.numpy()) for v in (*model.weights, *model.optimizer.variables)]


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6, rtol=2e-6)


def assert_copies_are_rounded(model):
    copies = [v for v in model.trainable_variables if isinstance(v.value, Rounded)]
    assert copies
    for variable in copies:
        for copy in variable.value.values:
            np.testing.assert_array_equal(copy.numpy(), rounded(variable.numpy()))


Adam = functools.partial(optimizers.Adam, 0.01, epsilon=1e-2)
CASES = {
    "adamw": {"make": lambda: optimizers.AdamW(0.01, global_clipnorm=0.5, epsilon=1e-2)},
    "lamb": {"make": lambda: LAMB(0.01)},
    "constraint": {"make": Adam, "constraint": keras.constraints.MaxNorm(0.8)},
    "accumulate": {"make": lambda: Adam(gradient_accumulation_steps=2, clipnorm=0.1)},
    "averages": {
        "make": lambda: Adam(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    },
    "scaled": {
        "make": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=2.0**40)
    },
    "eager": {"make": lambda: optimizers.SGD(0.1), "run_eagerly": True},
    "tied": {"make": Adam, "first": Tied},
}
QUICK = ("adamw", "averages")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in CASES]
)
def test_rounded_weights_give_the_gradients_of_exact_ones(name):
    model = fit(made(strategy(3), **CASES[name]))
    assert_near(numbers(model), numbers(fit(made(None, **CASES[name]))))
    assert_copies_are_rounded(model)


@pytest.mark.full
def test_averages_are_swapped_in_and_out():
    def trained(within):
        model = made(within, lambda: Adam(use_ema=True, ema_momentum=0.9))
        return numbers(fit(model, 3, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]))

    assert_near(trained(strategy(3)), trained(None))


@pytest.mark.slow
def test_weights_that_bfloat16_represents_arrive_as_they_are():
    """Weights, gradients and rates are few binary digits, so nothing is rounded."""
    x = np.sign(DRAW.standard_normal((16, 64))).astype("f4")

    def weights(**settings):
        with strategy(4, **settings).scope():
            layer = layers.Dense(32, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((64,)), layer])
            model.compile(optimizers.SGD(0.5), lambda y, z: tf.reduce_sum(y * z, -1))
        model.fit(x, x[:, :32], 16, 2, shuffle=False, verbose=0)
        assert isinstance(layer.kernel.value, Rounded) == (settings == {})
        return layer.kernel.numpy(), model.predict(x, verbose=0)

    for one, other in zip(weights(), weights(weights_wire=None), strict=True):
        assert np.any(one)
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_files_and_assignments_are_exact(tmp_path):
    model = fit(made(strategy(3), Adam))
    kernel, predicted = model.layers[1].kernel, model.predict(X, verbose=0)
    assert_near([model(X).numpy()], [predicted])  # rounding to bfloat16 would be 1e-3
    assert np.any(kernel.numpy() != rounded(kernel.numpy()))
    model.save(tmp_path / "model.keras")
    path = tf.train.Checkpoint(model=model).save(tmp_path / "state")
    for within in (None, strategy(2)):
        with within.scope() if within else contextlib.nullcontext():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        for one, other in zip(numbers(loaded), numbers(model), strict=True):
            np.testing.assert_array_equal(one, other)
    assert_near([loaded.predict(X, verbose=0)], [predicted])

    saved = model.get_weights()
    model.set_weights([w + 0.1 for w in saved])
    kernel.value.assign_add(np.ones(kernel.shape, "f4"))
    np.testing.assert_array_equal(kernel.numpy(), (saved[0] + np.float32(0.1)) + 1)
    assert_copies_are_rounded(model)
    tf.train.Checkpoint(model=model).restore(path)
    assert_near([model.predict(X, verbose=0)], [predicted])
    assert_near(numbers(fit(model)), numbers(fit(loaded)))


class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


@pytest.mark.full
def test_a_backup_continues_with_another_number_of_replicas(tmp_path):
    def backed_up(devices, *others):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        return numbers(fit(made(strategy(devices), Adam), 4, [backup, *others]))

    with pytest.raises(InterruptedError):
        backed_up(3, Stop())
    assert_near(backed_up(2), numbers(fit(made(strategy(3), Adam), 4)))


def test_half_as_many_bytes_gather_the_weights():
    within = strategy(2)
    model = fit(made(within, Adam), 1)
    (gathered,) = [row for row in within.explain() if "bf16" in str(row.method)]
    sizes = [v.value.shape.num_elements() for v in model.weights if isinstance(v.value, Rounded)]
    assert gathered.bytes == pytest.approx(sum(sizes), rel=0.01)  # half of an all-reduce's
    (row,) = [row for row in within.layouts() if row.path == model.layers[1].kernel.path]
    assert row.bytes(0) == (40 * 64 * 4, 3 * 20 * 64 * 4) and "is rounded" in row.words


# -------------------------------------------------------------------------- several optimizers


@pytest.mark.slow
def test_a_model_is_compiled_again():
    model = fit(made(strategy(2), Adam))
    exact = model.layers[1].kernel.numpy()
    with model.distribute_strategy.scope():
        model.compile(LAMB(0.01), "mse")  # holds whole weights
        model.optimizer.build(model.trainable_variables)
    np.testing.assert_array_equal(model.layers[1].kernel.numpy(), exact)
    fit(model)
    assert_copies_are_rounded(model)


@pytest.mark.slow
def test_two_optimizers_that_share_a_weight_out_differently_are_refused():
    model = fit(made(strategy(2), Adam))
    first = model.optimizer
    with model.distribute_strategy.scope():
        model.compile(LAMB(0.01), "mse")
    fit(model)
    with model.distribute_strategy.scope():
        model.compile(first, "mse")
    with pytest.raises(ValueError, match="two optimizers train .*dense"):
        fit(model)


# ------------------------------------------------------------------------------------ refusals


class Clips(keras.Model):
    def train_step(self, data):
        logs = super().train_step(data)
        for variable in self.trainable_variables:
            variable.assign(tf.clip_by_value(variable.value, -0.1, 0.1))
        return logs


def test_an_assignment_within_a_step_is_refused():
    with pytest.raises(ValueError, match=r"a step assigns dense.*kernel.*Give the weight its"):
        fit(made(strategy(2), Adam, kind=Clips))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shard": None}, "got shard=None"),
        ({"shard": "all"}, "got shard='all'"),
        ({"weights_wire": "int8"}, "sends weights as 'int8'; expected 'fp32' or 'bf16'"),
        ({"weights_wire": "bf17"}, "weights_wire"),
        ({"grid": {"stages": 2}, "pipeline": {"microbatches": 2}}, "does not work with grid="),
        ({"backend": "tensorflow", "algorithm": "auto"}, "weights_wire='bf16' needs tfscale's own"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        strategy(2, **settings)


def test_patterns_choose_the_weights():
    with strategy(2, weights_wire={"first/bias": "bf16"}).scope():
        model = keras.Sequential([keras.Input((40,)), layers.Dense(64, name="first")])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
    assert [type(v.value) is Rounded for v in model.trainable_variables] == [False, True]


# --------------------------------------------------------------------------- several workers

WORKERS = {"2x1": "1x2", "2x2": "1x4"}  # as many replicas of one process


@pytest.fixture(scope="module")
def trained(request):
    @functools.cache
    def outcome(layout, tested):
        return take("exact.py", "rounded", layout, chosen(request, BY_NAME, [tested]))

    return outcome


QUICK_OF_WORKERS = ("adamw", "own_step_builds_a_layer")
REFUSED = ("own_step_moves_weights", "pruned", "pruned_channels")  # they assign weights in steps


def pairs():
    for layout, alike in WORKERS.items():
        for name, case in BY_NAME.items():
            if name not in REFUSED and layout in case.layouts and alike in case.layouts:
                quick = layout == "2x1" and name in QUICK_OF_WORKERS
                yield pytest.param(layout, name, marks=[] if quick else pytest.mark.full)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("layout", "case"), list(pairs()))
def test_workers_train_as_devices_of_a_process(trained, layout, case):
    (expected,) = trained(WORKERS[layout], layout)[case]
    judge(
        functools.partial(check, BY_NAME[case], expected),
        trained(layout, layout)[case],
        lambda: take("exact.py", "rounded", layout, [case])[case],
    )
