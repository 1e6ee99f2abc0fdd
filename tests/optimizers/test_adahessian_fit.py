"""AdaHessian in ``fit``: graphs, eager steps, XLA, loss scaling, accumulation, replicas."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import mirrored
from keras import layers

from tfscale import ScaleStrategy
from tfscale.training.optimizers.adahessian import AdaHessian

ROWS, BATCH = 64, 16
# Far from where rounding is amplified by a curvature near zero.
AdaHessian = functools.partial(AdaHessian, learning_rate=0.05, epsilon=0.1)


def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 5)).astype(np.float32)
    return x, np.tanh(x[:, :2]) + 0.1 * rng.standard_normal((ROWS, 2)).astype(np.float32)


def model_of(optimizer, hidden=(), dtype=None, **how):
    keras.utils.set_random_seed(1)
    first = layers.Dense(8, "tanh", dtype=dtype)
    model = keras.Sequential(
        [layers.Input((5,)), first, *hidden, layers.Dense(2, dtype=dtype)], name="net"
    )
    if dtype:
        model.dtype_policy = keras.DTypePolicy(dtype)
    model.compile(optimizer, "mse", **how)
    return model


def fit(model, epochs=2, batch=BATCH):
    x, y = data()
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return flat(model.get_weights())


def flat(arrays):
    return np.concatenate([np.reshape(a, -1) for a in arrays])


def in_half(scale=2.0**15, **how):
    """A model in mixed_float16, its AdaHessian, and what scales its loss."""
    scaler = keras.optimizers.LossScaleOptimizer(AdaHessian(), initial_scale=scale)
    model = model_of(scaler, dtype="mixed_float16", **how)
    scaler.build(model.trainable_variables)
    return model, scaler.inner_optimizer, scaler


@functools.cache
def plain(**arguments):
    return fit(model_of(AdaHessian(**arguments)))


WAYS = {
    "eagerly": (AdaHessian, {"run_eagerly": True}),
    "with XLA": (AdaHessian, {"jit_compile": True}),
    "several steps": (AdaHessian, {"steps_per_execution": 2}),
    "scaled": (functools.partial(AdaHessian, loss_scale_factor=1024.0), {}),
    "scaled eagerly": (functools.partial(AdaHessian, loss_scale_factor=8.0), {"run_eagerly": True}),
    "dynamic": (lambda **a: keras.optimizers.LossScaleOptimizer(AdaHessian(**a)), {}),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("way", "each"), [*((way, 3) for way in WAYS), ("dynamic", 1)])
def test_every_way_to_run_a_step_gives_the_same(way, each):
    make, how = WAYS[way]
    found = fit(model_of(make(update_each=each), **how))
    np.testing.assert_allclose(found, plain(update_each=each), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_second_pass_is_not_run_in_other_steps():
    """Counted by a layer, where its gradient is differentiated."""
    count = tf.Variable(0, trainable=False)

    @tf.custom_gradient
    def counted(dy):
        def differentiated(ddy):
            with tf.control_dependencies([count.assign_add(1)]):
                return tf.identity(ddy)

        return tf.identity(dy), differentiated

    @tf.custom_gradient
    def counting(x):
        return tf.identity(x), counted

    for each, expected in ((1, 8), (3, 3)):
        count.assign(0)
        fit(model_of(AdaHessian(update_each=each), hidden=[layers.Lambda(counting)]))
        assert count.numpy() == expected


# --------------------------------------------------------------------- loss scaling


def curvatures(optimizer):
    """D of the only step so far."""
    return flat(np.sqrt(v.numpy() / (1 - optimizer.beta_2)) for v in optimizer._velocities)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("scale", [2.0**4, 2.0**15])
@pytest.mark.parametrize("eagerly", [False, True])
def test_in_float16_curvature_is_that_of_the_unscaled_loss(scale, eagerly):
    exact = AdaHessian()
    whole = model_of(exact)
    model, optimizer, _ = in_half(scale, run_eagerly=eagerly)
    optimizer.follow(model)
    fit(whole, 1, ROWS)
    fit(model, 1, ROWS)
    expected = curvatures(exact)
    np.testing.assert_allclose(curvatures(optimizer), expected, atol=0.01 * np.max(expected))


@pytest.mark.slow
def test_what_normalizes_is_measured_from_within_a_branch_too():
    def first_step(make):
        return fit(model_of(make(), [layers.BatchNormalization()]), 1, ROWS)

    scaled = first_step(lambda: keras.optimizers.LossScaleOptimizer(AdaHessian(update_each=2)))
    np.testing.assert_allclose(scaled, first_step(AdaHessian), rtol=0, atol=1e-6)


def test_a_skipped_step_leaves_the_state_alone():
    model, optimizer, scaler = in_half()
    fit(model, 1)
    before = flat([*model.get_weights(), *(v.numpy() for v in optimizer.variables)])
    x, y = data()
    model.train_on_batch(np.full_like(x, 1e5), y)
    assert scaler.dynamic_scale.numpy() == 2.0**14
    after = flat([*model.get_weights(), *(v.numpy() for v in optimizer.variables)])
    np.testing.assert_array_equal(after, before)
    model.train_on_batch(x, y)
    assert np.all(np.isfinite(flat(model.get_weights())))
    assert np.any(flat(model.get_weights()) != flat(before[: len(flat(model.get_weights()))]))


def scaled_step(scaler, w, d):
    with scaler.inner_optimizer.given([tf.constant(d)]):
        scaler.apply([tf.constant([8.0, 8.0])], [w])


def test_a_curvature_that_overflowed_is_not_used():
    """The root of v, corrected, stays as it was; what has none yet does not move."""
    scaler = keras.optimizers.LossScaleOptimizer(AdaHessian(epsilon=0.0), initial_scale=8.0)
    w = keras.Variable([1.0, 2.0], name="kernel")
    scaler.build([w])
    scaled_step(scaler, w, [np.inf, 1.0])
    np.testing.assert_array_equal(w, [1, 2])
    scaler.inner_optimizer.iterations.assign(0)
    for _ in range(3):
        scaled_step(scaler, w, [2.0, 4.0])
    before = w.numpy()
    scaled_step(scaler, w, [np.nan, 1.0])
    m = scaler.inner_optimizer._momentums[0].numpy() / (1 - 0.9**4)
    np.testing.assert_allclose(w, before - 0.05 * m / [2, 4], rtol=1e-5)


WRAPS = {
    "bare": lambda optimizer: optimizer,
    "scaled": lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0),
}


def after_steps(wrap, curvatures, **arguments):
    """Return both numbers of a variable after steps with these D and gradients of 1."""
    inner = AdaHessian(learning_rate=0.1, epsilon=0.5, **arguments)
    optimizer, w = WRAPS[wrap](inner), keras.Variable([1.0, 2.0], name="kernel")
    optimizer.build([w])
    for d in curvatures:
        with inner.given([tf.constant(d)]):
            optimizer.apply([tf.constant([1.0, 1.0])], [w])
    return w.numpy()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("power", [1.0, 0.8])
def test_where_the_curvature_is_0_steps_are_those_of_the_momentum_by_epsilon(wrap, power):
    """Scaled or not."""
    found = after_steps(wrap, [[0.0, 0.0]], hessian_power=power)
    np.testing.assert_allclose(found, [1 - 0.1 / 0.5, 2 - 0.1 / 0.5], rtol=1e-6)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e30])
def test_what_has_had_no_curvature_does_not_move_and_then_begins_anew(wrap, bad):
    """1e30 is finite, and its square is not."""
    np.testing.assert_array_equal(after_steps(wrap, [[bad, 1.0]] * 3), [1, 2])
    found = after_steps(wrap, [[bad, 1.0]] * 3 + [[0.0, 4.0]])
    np.testing.assert_allclose(found, [1 - 0.1 / 0.5, 2 - 0.1 / (4 + 0.5)], rtol=1e-5)


def test_a_scaler_is_known_however_it_came_to_be():
    class Own(keras.optimizers.LossScaleOptimizer):
        def __init__(self, inner):
            super().__init__(inner, initial_scale=64.0)

    inner = AdaHessian()
    own = Own(inner)
    assert inner._loss_scale() == 64.0
    config = keras.optimizers.LossScaleOptimizer(AdaHessian(), initial_scale=32.0).get_config()
    again = keras.optimizers.LossScaleOptimizer.from_config(config)
    assert again.inner_optimizer._loss_scale() == 32.0
    del own


def test_a_scaler_that_is_not_known_is_an_error():
    """Something else does to it what Keras's scaler does: D would be that of the scaled loss."""
    optimizer, w = AdaHessian(), keras.Variable([1.0, 2.0], name="kernel")
    optimizer.loss_scale_factor = None
    with pytest.raises(RuntimeError, match="by how much its loss is scaled.*factor to 1.0"):
        optimizer.apply([tf.constant([1.0, 1.0])], [w])
    optimizer.loss_scale_factor = 1.0
    with optimizer.given([tf.constant([1.0, 1.0])]):
        optimizer.apply([tf.constant([1.0, 1.0])], [w])


# ------------------------------------------------------------ accumulation, checkpoints


def test_accumulated_batches_are_one_batch():
    """The window has the same signs: the sums are equal, not only on average."""
    together = fit(model_of(AdaHessian(update_each=2)), batch=32)
    apart = fit(model_of(AdaHessian(update_each=2, gradient_accumulation_steps=2)))
    np.testing.assert_allclose(apart, together, rtol=0, atol=2e-6)


def test_training_goes_on_from_a_file_to_the_bit(tmp_path):
    model = model_of(AdaHessian(update_each=3, seed=4))
    fit(model, 1)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(fit(model, 1), fit(again, 1))


# -------------------------------------------------------------------------- replicas


DEVICES = ["/cpu:0", "/cpu:1"]
STRATEGIES = {
    "scale": lambda: ScaleStrategy("ring", devices=DEVICES),
    "mirrored": mirrored,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("strategy", "each"), [("scale", 1), ("scale", 3), ("mirrored", 3)])
def test_two_replicas_are_one_device(strategy, each):
    with STRATEGIES[strategy]().scope():
        model = model_of(AdaHessian(update_each=each))
    np.testing.assert_allclose(fit(model), plain(update_each=each), rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", ["scale", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_two_replicas_with_a_scaled_loss_are_one_device(strategy):
    with STRATEGIES[strategy]().scope():
        model = model_of(keras.optimizers.LossScaleOptimizer(AdaHessian()))
    np.testing.assert_allclose(fit(model), plain(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_replicas_that_accumulate_are_one_device():
    with STRATEGIES["scale"]().scope():
        model = model_of(AdaHessian(gradient_accumulation_steps=2))
    alone = fit(model_of(AdaHessian(gradient_accumulation_steps=2)))
    np.testing.assert_allclose(fit(model), alone, rtol=0, atol=1e-5)


# ----------------------------------------------------------------- eager steps of one's own


def test_a_model_may_be_compiled_anew():
    model = model_of(AdaHessian(), run_eagerly=True)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    fit(model, 1)
    model.compile(AdaHessian(), "mse", run_eagerly=True)
    fit(model, 1)
    assert model.optimizer.iterations.numpy() == ROWS // BATCH


def test_a_model_of_another_optimizer_has_to_be_followed():
    model = model_of(keras.optimizers.SGD(0.1), run_eagerly=True)
    model.compile(keras.optimizers.LossScaleOptimizer(AdaHessian()), "mse", run_eagerly=True)
    with pytest.raises(RuntimeError, match=r"then call optimizer.follow\(model\) once"):
        fit(model, 1)
    model.optimizer.inner_optimizer.follow(model)
    fit(model, 1)
    assert model.optimizer.iterations.numpy() == ROWS // BATCH


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        layers.BatchNormalization,
        layers.LayerNormalization,
        functools.partial(layers.GroupNormalization, 2),
    ],
)
def test_eager_steps_of_a_model_that_normalizes_are_refused(layer):
    def model(optimizer, **how):
        return model_of(optimizer, [layer(name="even")], **how)

    fit(model(AdaHessian()), 1)
    fit(model(keras.optimizers.SGD(0.1), run_eagerly=True), 1)
    with pytest.raises(NotImplementedError, match="eagerly where even normalizes.*without run_e"):
        fit(model(AdaHessian(), run_eagerly=True), 1)


def test_a_loop_of_ones_own_is_fit():
    model, (x, y) = model_of(AdaHessian(update_each=3)), data()
    for start in [*range(0, ROWS, BATCH)] * 2:
        rows = slice(start, start + BATCH)
        with model.optimizer.recording():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x[rows], training=True) - y[rows]) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    found = flat(model.get_weights())
    np.testing.assert_allclose(found, plain(update_each=3), rtol=0, atol=1e-5)
