"""AdaHessian's D against full Hessians, and what it says where there is none."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.optimizers.common import flat, hessian
from tfscale.analysis.curvature.probes import signs
from tfscale.training.optimizers.adahessian import AdaHessian

# ------------------------------------------------------------------ against the Hessian


def dense():
    return [layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)]


def conv():
    return [
        layers.Input((6, 6, 2)),
        layers.Conv2D(3, 3, activation="tanh"),
        layers.MaxPooling2D(2),
        layers.DepthwiseConv2D(2, activation="softplus"),
        layers.Flatten(),
        layers.Dense(2),
    ]


def batch_norm():
    hidden = [layers.Dense(5), layers.BatchNormalization(), layers.Activation("gelu")]
    return [layers.Input((4,)), *hidden, layers.Dense(2)]


def attention():
    x = layers.Input((4, 6))
    y = layers.LayerNormalization()(layers.MultiHeadAttention(2, 3)(x, x))
    return keras.Model(x, layers.Dense(2)(layers.GlobalAveragePooling1D()(y)))


def lstm():
    return [layers.Input((5, 3)), layers.LSTM(4), layers.Dense(2)]


def embedding():
    """Rows come twice, and one never."""
    hidden = [layers.GlobalAveragePooling1D(), layers.Dense(4, "tanh")]
    return [layers.Input((5,), dtype="int32"), layers.Embedding(7, 3), *hidden, layers.Dense(2)]


def group_norm():
    hidden = [layers.Dense(6), layers.GroupNormalization(2), layers.Activation("gelu")]
    return [layers.Input((4,)), *hidden, layers.Dense(2)]


def made(net):
    keras.utils.set_random_seed(3)
    built = net()
    return built if isinstance(built, keras.Model) else keras.Sequential(built)


def in_double(net):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    try:
        return made(net)
    finally:
        keras.config.set_dtype_policy(before)


class Problem:
    """A small net, its loss, and the Hessian of that."""

    def __init__(self, net):
        self.net, self.model = net, made(net)
        rng = np.random.default_rng(0)
        shape = (4, *self.model.input_shape[1:])
        whole = self.model.inputs[0].dtype == "int32"
        x = rng.integers(0, 6, shape) if whole else rng.standard_normal(shape)
        self.x = tf.constant(x, self.model.inputs[0].dtype)
        self.y = tf.constant(rng.standard_normal((4, 2)), tf.float32)
        self.variables = self.model.trainable_variables

    def loss(self, rows=slice(None), model=None):
        model = model or self.model
        predicted = model(tf.cast(self.x[rows], model.inputs[0].dtype), training=True)
        return tf.reduce_sum((predicted - tf.cast(self.y[rows], predicted.dtype)) ** 2) / 8

    @functools.cached_property
    def hessian(self):
        model = in_double(self.net)
        model.set_weights(self.model.get_weights())
        variables = [v.value for v in model.trainable_variables]

        @tf.function
        def gradient():
            with tf.GradientTape() as tape:
                loss = self.loss(model=model)
            return [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

        return hessian(gradient, variables)

    def probe(self, step=0, sample=0, seed=0):
        zs = [
            signs(v.shape, "float32", (seed, i, sample), step) for i, v in enumerate(self.variables)
        ]
        return flat(zs)

    def measure(self, optimizer, rows=slice(None)):
        with optimizer.recording():
            with tf.GradientTape() as tape:
                loss = self.loss(rows)
            return optimizer.curvature(tape.gradient(loss, self.variables), self.variables)

    def curvature(self, optimizer, how="graph"):
        """Return a function from an iteration to its D."""
        optimizer.build(self.variables)

        def measure():
            return self.measure(optimizer)

        if how != "eager":
            measure = tf.function(measure, jit_compile=how == "xla")

        def at(iteration):
            optimizer.iterations.assign(iteration)
            return flat(measure())

        return at


def assert_same(found, expected, share=2e-6):
    assert np.max(np.abs(found - expected)) <= share * np.max(np.abs(expected))


PLAIN = [dense, conv, lstm, embedding]
NORMALIZED = [batch_norm, attention, group_norm]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("net", PLAIN + NORMALIZED)
def test_it_is_z_times_hessian_times_z(net):
    problem = Problem(net)
    expected = [z * (problem.hessian @ z) for z in (problem.probe(step=t) for t in (0, 1))]
    always = problem.curvature(AdaHessian())
    each_second = problem.curvature(AdaHessian(update_each=2))
    for t in (0, 1):
        assert_same(always(t), expected[t])
    assert_same(each_second(0), expected[0])
    assert not np.any(each_second(1))


@pytest.mark.parametrize("net", PLAIN)
def test_eagerly_too(net):
    problem = Problem(net)
    z = problem.probe()
    assert_same(problem.curvature(AdaHessian(), "eager")(0), z * (problem.hessian @ z))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("net", "each"), [(dense, 1), (conv, 2), (embedding, 2), (batch_norm, 1)])
def test_under_xla_too(net, each):
    problem = Problem(net)
    z = problem.probe()
    at = problem.curvature(AdaHessian(update_each=each), "xla")
    assert_same(at(0), z * (problem.hessian @ z))
    assert each == 1 or not np.any(at(1))


@pytest.mark.slow
def test_the_error_falls_with_the_root_of_samples():
    """The error is as large as the rows of the Hessian say."""
    problem, draws = Problem(dense), 100
    diagonal = np.diag(problem.hessian)
    rest = np.sqrt(np.sum((problem.hessian - np.diag(diagonal)) ** 2, axis=1))
    for samples in (1, 4, 16):
        at = problem.curvature(AdaHessian(samples=samples, seed=5))
        errors = np.array([at(t) - diagonal for t in range(draws)])
        root = np.sqrt(np.mean(errors**2))
        expected = np.sqrt(np.mean(rest**2) / samples)
        assert abs(root / expected - 1) < 0.15
        assert np.max(np.abs(np.mean(errors, 0))) < 5 * np.max(rest) / np.sqrt(samples * draws)


def test_samples_are_averaged():
    problem = Problem(dense)
    zs = [problem.probe(sample=i, seed=9) for i in range(3)]
    found = problem.curvature(AdaHessian(samples=3, seed=9))(0)
    assert_same(found, np.mean([z * (problem.hessian @ z) for z in zs], axis=0))


def test_what_replicas_measure_adds_up_to_the_global_batch():
    problem, optimizer = Problem(conv), AdaHessian()
    optimizer.build(problem.variables)

    @tf.function
    def parts():
        halves = [problem.measure(optimizer, rows) for rows in (slice(0, 1), slice(1, 4))]
        return problem.measure(optimizer), [a + b for a, b in zip(*halves)]

    whole, summed = parts()
    assert_same(flat(summed), flat(whole))


# ----------------------------------------------------------------- where there is none


class Normalized(layers.Layer):
    def call(self, x):
        return tf.nn.local_response_normalization(x)


class Recomputed(layers.Layer):
    def __init__(self, **how):
        super().__init__(**how)
        self.inner = layers.Dense(4, "tanh")

    def call(self, x):
        return tf.recompute_grad(lambda y: self.inner(y))(x)


def fit(hidden, shape, eager=False):
    first, last = layers.Dense(3, name="first"), layers.Dense(2, name="last")
    model = keras.Sequential([layers.Input(shape), first, hidden, last])
    model.compile(AdaHessian(), "mse", run_eagerly=eager)
    model.fit(np.ones((2, *shape)), np.ones((2, *model.output_shape[1:])), verbose=0)


@pytest.mark.parametrize(
    ("hidden", "shape", "eager", "names"),
    [
        (lambda: Normalized(name="lrn"), (4, 4, 2), False, "first/bias: .*lrn.*LRNGrad"),
        (lambda: Normalized(name="lrn"), (4, 4, 2), True, "first/bias: .*LRNGrad"),
        (
            lambda: layers.UpSampling2D(2, interpolation="bilinear", name="up"),
            (4, 4, 2),
            False,
            r'first/bias: .*up.*ResizeBilinearGrad, for interpolation="bilinear"',
        ),
        (lambda: Recomputed(name="again"), (3,), False, "again/dense.*/bias: recompute_grad"),
    ],
)
def test_a_gradient_without_derivative_is_refused_by_name(hidden, shape, eager, names):
    keras.backend.clear_session()
    with pytest.raises(NotImplementedError, match=names) as refused:
        fit(hidden(), shape, eager)
    assert "Replace the layer that this names" in str(refused.value)


def test_where_it_is_zero_it_is_zero():
    """A derivative that is missing because there is no path is no error."""
    a, b = keras.Variable([2.0], name="a"), keras.Variable([3.0], name="b")
    optimizer = AdaHessian()
    optimizer.build([a, b])

    @tf.function
    def measured():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a * a + 5.0 * b)
        return optimizer.curvature(tape.gradient(loss, [a, b]), [a, b])

    assert [d.numpy().tolist() for d in measured()] == [[2.0], [0.0]]


def apply_made_elsewhere(in_graph):
    w = keras.Variable([1.0, 2.0], name="kernel")
    optimizer = AdaHessian()
    optimizer.build([w])

    def apply(g):
        optimizer.apply([g], [w])

    (tf.function(apply) if in_graph else apply)(tf.ones(2))


def test_gradients_of_another_function_are_refused():
    with pytest.raises(ValueError, match="cannot see how the gradient of kernel was computed"):
        apply_made_elsewhere(in_graph=True)


def test_eager_gradients_without_a_record_are_refused():
    with pytest.raises(RuntimeError, match=r"within `with optimizer.recording\(\):`"):
        apply_made_elsewhere(in_graph=False)


def test_a_loss_that_is_linear_everywhere_is_refused():
    w = keras.Variable([1.0, 2.0], name="kernel")
    optimizer = AdaHessian()
    linear = pytest.raises(ValueError, match="the loss is linear in all variables")
    with linear, optimizer.recording():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(3.0 * w)
        optimizer.apply(tape.gradient(loss, [w]), [w])
