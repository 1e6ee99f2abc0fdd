"""AdaHessian under Keras 2: the same D, rule, and ways to run a step as under Keras 3."""

import contextlib
import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_addons as tfa
from keras import layers

from tests.addons.models import furthest, scale
from tests.optimizers.common import SHAPES, assert_close, flat, gradients, hessian
from tests.optimizers.test_adahessian import ARGUMENTS, CASES, Reference
from tfscale.analysis.curvature.probes import signs
from tfscale.optimizers import AdaHessian

LossScaleOptimizer = keras.mixed_precision.LossScaleOptimizer
ROWS, BATCH = 64, 16

# ------------------------------------------------------------------ against the Hessian


def dense():
    return [layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)]


def conv():
    hidden = [layers.Conv2D(3, 3, activation="softplus"), layers.MaxPooling2D(2)]
    return [layers.Input((6, 6, 2)), *hidden, layers.Flatten(), layers.Dense(2)]


def embedding():
    """Rows come twice, and one never."""
    hidden = [layers.GlobalAveragePooling1D(), layers.Dense(4, "tanh")]
    return [layers.Input((5,), dtype="int32"), layers.Embedding(7, 3), *hidden, layers.Dense(2)]


def of_addons():
    weighted = tfa.layers.WeightNormalization(layers.Dense(4), data_init=False)
    hidden = [layers.Dense(5, tfa.activations.gelu), weighted, layers.Activation("tanh")]
    return [layers.Input((4,)), *hidden, layers.Dense(2)]


def normalized():
    hidden = [layers.Dense(6), layers.BatchNormalization(), layers.Activation("tanh")]
    norms = [tfa.layers.GroupNormalization(groups=2), layers.LayerNormalization()]
    return [layers.Input((4,)), *hidden, layers.Dense(6), *norms, layers.Dense(2)]


class Problem:
    """A small net, its loss, and the Hessian of that."""

    def __init__(self, net):
        self.net, self.model = net, self.made(net, "float32")
        rng, (first,) = np.random.default_rng(0), self.model.inputs
        shape = (4, *first.shape[1:])
        self.x = rng.integers(0, 6, shape) if net is embedding else rng.standard_normal(shape)
        self.y = rng.standard_normal((4, 2))
        self.variables = self.model.trainable_variables

    @staticmethod
    def made(net, dtype):
        keras.utils.set_random_seed(3)
        keras.mixed_precision.set_global_policy(dtype)
        try:
            return keras.Sequential(net())
        finally:
            keras.mixed_precision.set_global_policy("float32")

    def gradient(self, model):
        with tf.GradientTape() as tape:
            predicted = model(tf.cast(self.x, model.inputs[0].dtype), training=True)
            loss = tf.reduce_sum((predicted - tf.cast(self.y, predicted.dtype)) ** 2) / 8
        return tape.gradient(loss, model.trainable_variables)

    @functools.cached_property
    def hessian(self):
        model = self.made(self.net, "float64")
        model.set_weights(self.model.get_weights())

        @tf.function
        def gradient():
            return [tf.convert_to_tensor(g) for g in self.gradient(model)]

        return hessian(gradient, model.trainable_variables)

    def expected(self, samples=1):
        """Return the curvature that the reference draws at step 0 with the seed 5."""
        zs = [
            flat(signs(v.shape, "float32", (5, i, one), 0) for i, v in enumerate(self.variables))
            for one in range(samples)
        ]
        return np.mean([z * (self.hessian @ z) for z in zs], axis=0)

    def curvature(self, how, **given):
        """D in the steps 0 and 1."""
        optimizer = AdaHessian(seed=5, **given)
        optimizer.build(self.variables)

        def measure():
            with optimizer.recording():
                return optimizer.curvature(self.gradient(self.model), self.variables)

        if how != "eager":
            measure = tf.function(measure, jit_compile=how == "xla")
        for step in (0, 1):
            optimizer.iterations.assign(step)
            yield flat(measure())


def assert_same(found, expected):
    assert np.max(np.abs(found - expected)) <= 2e-6 * np.max(np.abs(expected))


@pytest.mark.parametrize(
    ("net", "how"),
    [
        *((net, "graph") for net in (dense, conv, embedding, of_addons, normalized)),
        *((net, "eager") for net in (dense, conv, embedding, of_addons)),
        *((net, "xla") for net in (dense, conv)),
    ],
)
def test_it_is_z_times_hessian_times_z(net, how):
    problem = Problem(net)
    first, second = problem.curvature(how, samples=2)
    assert_same(first, problem.expected(samples=2))
    assert not np.array_equal(second, first)
    due, not_due = problem.curvature(how, update_each=2)
    assert_same(due, problem.expected())
    assert not np.any(not_due)


# ------------------------------------------------------------- closed form and reference


@pytest.mark.parametrize("in_graph", [True, False])
def test_the_first_step_down_parabolas_is_newtons(in_graph):
    w = tf.Variable([-4.0, 30.0, 3.5], name="kernel")
    optimizer = AdaHessian(learning_rate=1.0, epsilon=0.0)

    def once():
        with optimizer.recording():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum([5.0, 70.0, 0.25] * (w - [1.0, 2.0, 3.0]) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    (tf.function(once) if in_graph else once)()
    np.testing.assert_allclose(w, [1, 2, 3], rtol=1e-5)
    curvature = np.sqrt(optimizer._velocities[0].numpy() / (1 - 0.999))
    np.testing.assert_allclose(curvature, [10, 140, 0.5], rtol=1e-5)


def variables():
    rng = np.random.default_rng(0)
    return [tf.Variable(rng.standard_normal(s), dtype="float32", name=n) for n, s in SHAPES.items()]


@pytest.mark.parametrize("case", CASES)
def test_200_steps_are_those_of_the_reference(case):
    """Compare with a schedule, and with decay for two of the four variables."""
    mine, theirs = CASES[case]
    grads = gradients(200)
    curvature = [[tf.abs(d) + 0.1 for d in ds] for ds in gradients(200, seed=2)]
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 150)
    optimizer = AdaHessian(schedule, exclude_from_weight_decay=["bias", "gamma"], **mine)
    found = variables()
    optimizer.build(found)

    @tf.function
    def apply(g, d):
        with optimizer.given(d):
            optimizer.apply_gradients(zip(g, found))

    for g, d in zip(grads, curvature, strict=True):
        apply(g, d)
    expected = []
    for i, (name, start) in enumerate(zip(SHAPES, variables(), strict=True)):
        own = {**theirs, **({"decay": 0.0} if name in ("bias", "gamma") else {})}
        one = Reference(start.numpy(), **own)
        for t in range(200):
            rate = 0.01 * (1 + np.cos(np.pi * min(t, 150) / 150)) / 2
            one.step(grads[t][i].numpy(), curvature[t][i].numpy(), rate)
        expected.append(one.w)
    assert_close([v.numpy() for v in found], expected, 1e-5, case)


# ------------------------------------------------------------------- ways to run a step

# Far from where rounding is amplified by a curvature near zero.
Steady = functools.partial(AdaHessian, learning_rate=0.05, epsilon=0.1)


def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 5)).astype(np.float32)
    return x, np.tanh(x[:, :2]) + 0.1 * rng.standard_normal((ROWS, 2)).astype(np.float32)


def model_of(make, strategy=None, policy="float32", **how):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        hidden = layers.Dense(8, "tanh", dtype=policy)
        model = keras.Sequential([layers.Input((5,)), hidden, layers.Dense(2, dtype=policy)])
        model._set_dtype_policy(policy)
        model.compile(make(), "mse", **how)
    return model


def fit(model, epochs=2):
    x, y = data()
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


@functools.cache
def plain(**arguments):
    return fit(model_of(functools.partial(Steady, **arguments)))


def scaled(**arguments):
    return LossScaleOptimizer(Steady(**arguments))


def scaled_by_8(**arguments):
    return LossScaleOptimizer(Steady(**arguments), dynamic=False, initial_scale=8.0)


WAYS = {
    "eagerly": (Steady, {"run_eagerly": True}),
    "with XLA": (Steady, {"jit_compile": True}),
    "several steps": (Steady, {"steps_per_execution": 2}),
    "scaled": (scaled, {}),
    "scaled by a constant": (scaled_by_8, {}),
    "scaled eagerly": (scaled, {"run_eagerly": True}),
    "scaled with XLA": (scaled, {"jit_compile": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_a_step_gives_the_same(way):
    make, how = WAYS[way]
    found = fit(model_of(functools.partial(make, update_each=3), **how))
    assert furthest(found, plain(update_each=3)) <= 1e-5


def step_of(model, optimizer, x, y):
    """One of a loop of one's own."""
    scale = getattr(optimizer, "get_scaled_loss", lambda loss: loss)
    unscale = getattr(optimizer, "get_unscaled_gradients", lambda found: found)
    with tf.GradientTape() as tape:
        loss = scale(tf.reduce_mean((model(x, training=True) - y) ** 2))
    found = unscale(tape.gradient(loss, model.trainable_variables))
    optimizer.apply_gradients(zip(found, model.trainable_variables))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Steady, scaled, scaled_by_8])
@pytest.mark.parametrize("in_graph", [True, False])
def test_a_loop_of_ones_own_is_fit(make, in_graph):
    model, optimizer = model_of(Steady), make(update_each=3)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    once = functools.partial(step_of, model, optimizer)
    once = tf.function(once) if in_graph else once
    for batch in tf.data.Dataset.from_tensor_slices(data()).batch(BATCH).repeat(2):
        with inner.recording():
            once(*batch)
    assert furthest(model.get_weights(), plain(update_each=3)) <= 1e-5


def test_a_model_of_another_optimizer_has_to_be_followed():
    model = model_of(lambda: keras.optimizers.SGD(0.1), run_eagerly=True)
    fit(model, 1)
    model.compile(scaled(), "mse", run_eagerly=True)
    with pytest.raises(RuntimeError, match=r"then call optimizer.follow\(model\) once"):
        fit(model, 1)
    model.optimizer.inner_optimizer.follow(model)
    fit(model, 1)
    assert model.optimizer.iterations.numpy() == ROWS // BATCH


@pytest.mark.parametrize(
    "layer", [layers.BatchNormalization, tfa.layers.InstanceNormalization], ids=str
)
def test_normalization_in_an_eager_fit_is_refused(layer):
    model = keras.Sequential([layers.Input((5,)), layer(name="norm"), layers.Dense(2)])
    model.compile(Steady(), "mse", run_eagerly=True)
    with pytest.raises(NotImplementedError, match="eagerly where norm normalizes"):
        fit(model, 1)


def test_eager_gradients_without_a_record_are_refused():
    model, optimizer = model_of(Steady), Steady()
    with pytest.raises(RuntimeError, match=r"within `with optimizer.recording\(\):`"):
        step_of(model, optimizer, *data())


def test_what_is_given_counts_once():
    w, optimizer = tf.Variable([1.0, 2.0], name="kernel"), AdaHessian(0.5, epsilon=0.0)
    optimizer.give([tf.constant([2.0, 4.0])])
    optimizer.apply_gradients([(tf.constant([1.0, 1.0]), w)])
    np.testing.assert_allclose(w, [0.75, 1.875], rtol=1e-6)
    with pytest.raises(RuntimeError, match="cannot see how they were computed"):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), w)])


# ------------------------------------------------------------------------- float16


def curvatures(optimizer):
    """D of the only step so far."""
    return [np.sqrt(v.numpy() / (1 - optimizer.beta_2)) for v in optimizer._velocities]


@pytest.mark.parametrize("eagerly", [False, True])
def test_in_float16_curvature_is_that_of_the_unscaled_loss(eagerly):
    """Keras wraps the optimizer itself."""
    exact, half = (
        model_of(Steady, policy=policy, run_eagerly=eagerly)
        for policy in ("float32", "mixed_float16")
    )
    for model in (exact, half):
        model.train_on_batch(*data())
    expected = curvatures(exact.optimizer)
    largest = max(np.max(d) for d in expected)
    assert furthest(curvatures(half.optimizer.inner_optimizer), expected) <= 0.01 * largest


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_skipped_step_leaves_the_state_alone(eagerly):
    model = model_of(Steady, policy="mixed_float16", run_eagerly=eagerly)
    fit(model, 1)
    state = [*model.trainable_variables, *model.optimizer.inner_optimizer.variables]
    state = [v for v in state if "iteration" not in v.name]
    before = [v.numpy() for v in state]
    x, y = data()
    model.train_on_batch(np.full_like(x, 1e5), y)
    assert model.optimizer.loss_scale.numpy() == 2.0**14
    assert furthest([v.numpy() for v in state], before) == 0
    model.train_on_batch(x, y)
    after = [v.numpy() for v in state]
    assert furthest(after, before) > 0 and all(np.all(np.isfinite(a)) for a in after)


def test_a_curvature_that_overflowed_is_not_used():
    """The root of v, corrected, stays as it was; what has none yet does not move."""
    inner, w = Steady(epsilon=0.0), tf.Variable([1.0, 2.0], name="kernel")
    scaler = LossScaleOptimizer(inner, dynamic=False, initial_scale=8.0)

    def step(d):
        with inner.given([tf.constant(d)]):
            scaler.apply_gradients([(tf.constant([1.0, 1.0]), w)])

    step([np.inf, 1.0])
    np.testing.assert_array_equal(w, [1, 2])
    inner.iterations.assign(0)
    for _ in range(3):
        step([2.0, 4.0])
    before = w.numpy()
    step([np.nan, 1.0])
    m = inner._momentums[0].numpy() / (1 - 0.9**4)
    np.testing.assert_allclose(w, before - 0.05 * m / [2, 4], rtol=1e-5)


@pytest.mark.parametrize("scale_it", [False, True])
@pytest.mark.parametrize(("bad", "moves"), [(0.0, 0.05 / 0.5), (np.inf, 0.0)])
def test_a_curvature_of_0_is_used_scaled_or_not(scale_it, bad, moves):
    inner, w = Steady(epsilon=0.5), tf.Variable([1.0, 2.0], name="kernel")
    optimizer = LossScaleOptimizer(inner, dynamic=False, initial_scale=8.0) if scale_it else inner
    with inner.given([tf.constant([bad, bad])]):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), w)])  # unscaled before, if scaled
    np.testing.assert_allclose(w, [1 - moves, 2 - moves], rtol=1e-5)


def test_a_scaler_that_is_not_known_is_an_error():
    optimizer, w = Steady(), tf.Variable([1.0, 2.0], name="kernel")
    optimizer._is_wrapped_by_loss_scale_optimizer = True
    with pytest.raises(RuntimeError, match="by how much its loss is scaled"):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), w)])


# -------------------------------------------------------------------------- replicas


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize(("make", "each"), [(Steady, 1), (Steady, 3), (scaled, 1), (scaled, 3)])
def test_two_replicas_are_one_device(make, each, eagerly):
    make, strategy = functools.partial(make, update_each=each), scale(2)
    model = model_of(make, strategy, run_eagerly=eagerly)
    assert furthest(fit(model), plain(update_each=each)) <= 1e-5
    rows = [row for row in strategy.explain() if row.variables[0].endswith("/curvature")]
    assert sum(row.elements for row in rows) == model.count_params()
    assert {row.calls for row in rows} == {len(range(0, 2 * ROWS // BATCH, each))}


@pytest.mark.parametrize("make", [Steady, scaled])
def test_a_loop_of_ones_own_on_two_replicas_is_fit(make):
    strategy = scale(2)
    model = model_of(Steady, strategy)
    with strategy.scope():
        optimizer = make()

    def step(x, y):
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean((model(x, training=True) - y) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH)
            loss = getattr(optimizer, "get_scaled_loss", tf.identity)(loss)
        found = tape.gradient(loss, model.trainable_variables)
        found = getattr(optimizer, "get_unscaled_gradients", list)(found)
        optimizer.apply_gradients(zip(found, model.trainable_variables))

    batches = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(data()).batch(BATCH).repeat(2)
    )
    run = tf.function(lambda *batch: strategy.run(step, batch))
    for batch in batches:
        run(*batch)
    assert furthest(model.get_weights(), plain()) <= 1e-5


class WithUnused(layers.Dense):
    def build(self, shape):
        super().build(shape)
        self.unused = self.add_weight("unused", (3,))


@pytest.mark.parametrize("each", [1, 3])
def test_a_variable_without_a_gradient_stays(each):
    strategy = scale(2)
    with strategy.scope():
        model = keras.Sequential([layers.Input((5,)), WithUnused(2)])
        model.compile(Steady(update_each=each), "mse")
    before = model.layers[0].unused.numpy()
    fit(model)
    np.testing.assert_array_equal(model.layers[0].unused.numpy(), before)


def test_other_strategies_are_refused():
    model = model_of(Steady, tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    with pytest.raises(RuntimeError, match="Under Keras 2 it needs tfscale.ScaleStrategy"):
        fit(model)


# ------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
def test_training_goes_on_from_a_file_to_the_bit(tmp_path, name):
    model = model_of(functools.partial(Steady, update_each=3, seed=4))
    fit(model, 1)
    model.save(tmp_path / name)
    again = keras.models.load_model(tmp_path / name)
    assert again.optimizer.get_config() == model.optimizer.get_config()
    assert furthest(fit(model, 1), fit(again, 1)) == 0


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_on_other_devices(tmp_path):
    model = model_of(functools.partial(Steady, update_each=3))
    fit(model, 1)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "c"))
    again = model_of(functools.partial(Steady, update_each=3), scale(2))
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).restore(path)
    assert furthest(fit(again, 1), plain(update_each=3)) <= 1e-5


@keras.saving.register_keras_serializable("tfscale-tests")
def mean(d, variable):
    return tf.reduce_mean(d)


@pytest.mark.parametrize("averaging", [{"a": 4, "b": None}, mean, "inputs", 8])
def test_every_argument_is_saved(averaging):
    given = {**ARGUMENTS, "averaging": averaging}
    saved = json.loads(json.dumps(keras.saving.serialize_keras_object(AdaHessian(**given))))
    again = keras.saving.deserialize_keras_object(saved)
    assert again.averaging == averaging
    config = again.get_config()
    assert all(config[name] == given[name] for name in given if name != "averaging")
