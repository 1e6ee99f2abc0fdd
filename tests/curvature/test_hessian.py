"""Products of matrices of a model, against derivatives that are computed in other ways."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.curvature import nets
from tfscale import curvature
from tfscale.analysis.curvature import progress


def made(build):
    keras.utils.set_random_seed(0)
    return build()


def whole(model, data, training):
    """The loss and its gradient, of all data in one batch."""
    x, y, weights = (*data, None)[:3]
    with tf.GradientTape() as tape:
        y_pred = model(x, training=training)
        loss = model.compute_loss(x, y, y_pred, weights)
    gradients = tape.gradient(loss, model.trainable_variables)
    return float(loss), np.concatenate([tf.convert_to_tensor(g).numpy().ravel() for g in gradients])


def assert_differences(operator, tolerance, step):
    """A product is how the gradient changes along the vector."""
    v = np.random.default_rng(1).standard_normal(operator.size)
    change = operator.gradient_at(step * v) - operator.gradient_at(-step * v)
    found, expected = operator @ v, change / (2 * step)
    np.testing.assert_allclose(found, expected, 0, tolerance * np.abs(expected).max())


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("build", "batch", "training"),
    [
        (nets.weighted, 16, False),
        (nets.by_weights, 16, False),
        (nets.normalized, 16, False),
        (nets.normalized, 49, True),
        pytest.param(nets.masked, 8, False, marks=pytest.mark.full),
        (nets.two_outputs, 16, False),
        (nets.attention, 5, False),
        (nets.own_loss, 7, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_products_are_those_of_the_hessian_of_all_data(in_double, build, batch, training):
    """Try several batches: of 49 rows in 16s, the last batch has one row."""
    model, data = made(build)
    h = curvature.Hessian(model, *data, batch_size=batch, training=training)
    before = [w.copy() for w in model.get_weights()]
    loss, moving = h.loss, h.gradient
    assert_differences(h, 1e-6, 1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    expected, gradient = whole(model, data, training)
    assert loss == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(moving, gradient, 1e-9, 1e-12)


def test_products_in_single_precision():
    model, data = made(nets.weighted)
    assert_differences(curvature.Hessian(model, *data, batch_size=16), 1e-2, 1e-2)


def test_linear_regression_has_a_closed_form(in_double):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 6)), rng.standard_normal((50, 1))
    model = keras.Sequential([layers.Input([6]), layers.Dense(1, use_bias=False)])
    model.compile(loss="mse")
    exact = 2 * x.T @ x / 50
    for kind in (curvature.Hessian, curvature.GaussNewton):
        np.testing.assert_allclose(kind(model, x, y, batch_size=7) @ np.eye(6), exact, 0, 1e-12)
    found = curvature.Hessian(model, x, y).eigenvalues(top=3, bottom=2)
    values = np.linalg.eigvalsh(exact)
    np.testing.assert_allclose(found.values, [*values[:-4:-1], *values[:2]], 1e-6)


@pytest.fixture
def logistic(in_double):
    """A net, its data, and the Gauss-Newton matrix and the Fisher matrix by hand."""
    model, (x, y, _) = made(nets.weighted)
    model.layers[0].kernel_regularizer = None
    with tf.GradientTape(persistent=True) as tape:
        logits = model(x)
    each = [tape.jacobian(logits, v).numpy() for v in model.trainable_variables]
    jacobian = np.concatenate([j.reshape(len(x), 3, -1) for j in each], -1)
    p = tf.nn.softmax(logits).numpy()
    bent = np.einsum("ni,ij->nij", p, np.eye(3)) - np.einsum("ni,nj->nij", p, p)
    newton = np.einsum("nia,nij,njb->ab", jacobian, bent, jacobian) / len(x)
    slopes = np.einsum("nia,ni->na", jacobian, p - np.eye(3)[y])
    return model, x, y, newton, slopes.T @ slopes / len(x)


def test_gauss_newton_and_fisher_have_closed_forms(logistic):
    model, x, y, newton, fisher = logistic
    make = {"batch_size": 16, "regularizers": False}
    eye = np.eye(len(newton))
    np.testing.assert_allclose(curvature.GaussNewton(model, x, y, **make) @ eye, newton, 0, 1e-12)
    np.testing.assert_allclose(curvature.Fisher(model, x, y, **make) @ eye, fisher, 0, 1e-12)


@pytest.mark.slow
def test_drawn_targets_have_the_gauss_newton_matrix_as_their_mean(logistic):
    """Rows that differ in nothing that matters still draw each for itself."""
    model, x, y, newton, _ = logistic
    rows = np.tile(x, (40, 1)) + 1e-9 * np.arange(40 * len(x))[:, None]
    f = curvature.Fisher(model, rows, np.tile(y, 40), batch_size=1000, kind="sampled")
    found = f @ np.eye(f.size)
    assert np.linalg.norm(found - newton) < 0.1 * np.linalg.norm(newton)
    again = curvature.Fisher(model, rows, np.tile(y, 40), batch_size=700, kind="sampled")
    np.testing.assert_allclose(again @ np.eye(f.size)[:, :3], found[:, :3], 0, 1e-9)


@pytest.mark.slow
def test_gauss_newton_and_hessian_are_one_for_linear_models(in_double):
    """The model has a penalty on an output, and an output that is computed from another one."""
    inputs = layers.Input([4])
    first = layers.Dense(3, activity_regularizer="l2", name="first")(inputs)
    second = layers.Dense(2, use_bias=False, trainable=False, name="second")(first)
    model = keras.Model(inputs, [first, second])
    model.compile(loss=["mse", "mse"])
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((10, 4)), [rng.standard_normal((10, n)) for n in (3, 2)]
    given = {"batch_size": 4}
    v = np.arange(15.0)
    expected = curvature.Hessian(model, x, y, **given) @ v
    np.testing.assert_allclose(curvature.GaussNewton(model, x, y, **given) @ v, expected, 1e-9)


class WithPenalty(keras.Sequential):
    """A loss of its own, in which Keras's own loss is half."""

    def compute_loss(self, *given, **named):
        return 0.5 * super().compute_loss(*given, **named)


@pytest.mark.slow
def test_gauss_newton_has_the_penalties_of_losses_of_ones_own(in_double):
    kernel = layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.25))
    model = WithPenalty([layers.Input([4]), kernel])
    model.compile(loss="mse")
    for kind in (curvature.Hessian, curvature.GaussNewton):
        found = kind(model, X, X[:, :3], batch_size=4) @ np.eye(15)
        data = np.concatenate([X, np.ones([10, 1])], 1)
        exact = np.kron(data.T @ data / 30 + 0.25 * np.diag([1, 1, 1, 1, 0]), np.eye(3))
        np.testing.assert_allclose(found, exact, 0, 1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("by_name", "an_object", "activation"),
    [
        ("mse", keras.losses.MeanSquaredError, None),
        ("sparse_categorical_crossentropy", keras.losses.SparseCategoricalCrossentropy, "softmax"),
        ("binary_crossentropy", keras.losses.BinaryCrossentropy, "sigmoid"),
    ],
)
def test_targets_are_drawn_for_losses_by_name(by_name, an_object, activation):
    found = []
    for loss in (by_name, an_object()):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Input([4]), layers.Dense(3, activation)])
        model.compile(loss=loss)
        y = Y if activation == "softmax" else X[:, :3]
        found.append(curvature.Fisher(model, X, y, kind="sampled") @ np.arange(15.0))
    np.testing.assert_array_equal(*found)


def test_a_loss_replaces_one_that_was_never_computed():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input([4]), layers.Dense(3)])
    found = []
    for compiled in ("mae", "mse"):  # as after the weights were loaded: no step has built the loss
        model.compile(loss=compiled)
        h = curvature.Hessian(model, X, X[:, :3], loss="mse" if compiled == "mae" else None)
        found.append(h @ np.arange(15.0))
    np.testing.assert_array_equal(*found)


def test_penalties_and_rules_choose(in_double):
    model, data = made(nets.weighted)
    make = functools.partial(curvature.Hessian, model, *data, batch_size=49)
    v = np.ones(make().size)
    with_, without = make() @ v, make(regularizers=False) @ v
    np.testing.assert_allclose(with_[:20] - without[:20], 0.02, 1e-6)  # 2 * 0.01, in the kernel
    np.testing.assert_allclose(with_[20:], without[20:])
    block = make().block("dense_?[0-9]*/kernel$")
    assert block.size == 35 and set(block.parts) < set(make().parts)
    full = make() @ np.eye(43)
    places = [*range(20), *range(25, 40)]
    np.testing.assert_allclose(block @ np.eye(35), full[np.ix_(places, places)], 1e-9, 1e-12)
    lists = make() @ [np.ones(w.shape) for w in model.trainable_variables]
    np.testing.assert_allclose(make().flat(lists), with_)


def test_dropout_is_the_same_in_each_pass():
    hidden = [layers.Dense(8, "tanh"), layers.Dropout(0.5)]
    model = keras.Sequential([layers.Input([4]), *hidden, layers.Dense(3)])
    model.compile(loss=nets.cross_entropy())
    x, y, _ = nets.numbers(32)
    h = curvature.Hessian(model, x, y, batch_size=16, training=True)
    state = model.layers[1].seed_generator.state.numpy()
    v = np.ones(h.size)
    np.testing.assert_array_equal(h @ v, h @ v)
    assert np.array_equal(model.layers[1].seed_generator.state.numpy(), state)
    off = curvature.Hessian(model, x, y, batch_size=16)
    assert np.abs(off @ v - h @ v).max() > 1e-3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["arrays", "dataset", "py_dataset"])
def test_data_of_each_kind_give_the_same(kind):
    model, (x, y, _) = made(nets.weighted)

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return math.ceil(len(x) / 16)

        def __getitem__(self, i):
            return x[16 * i : 16 * (i + 1)], y[16 * i : 16 * (i + 1)]

    data = {
        "arrays": lambda: (x, y),
        "dataset": lambda: (tf.data.Dataset.from_tensor_slices((x, y)).batch(10),),
        "py_dataset": lambda: (Rows(),),
    }[kind]()
    h = curvature.Hessian(model, *data)
    expected = curvature.Hessian(model, x, y, batch_size=49) @ np.ones(43)
    np.testing.assert_allclose(h @ np.ones(43), expected, 1e-4, 1e-5)
    np.testing.assert_allclose(h @ np.ones(43), expected, 1e-4, 1e-5)  # it is read once more


def test_an_operator_follows_its_model():
    """A callback keeps one while the model trains."""
    model, (x, y, _) = made(nets.weighted)
    h = curvature.Hessian(model, x, y, batch_size=16)
    before, loss = h @ np.ones(43), h.loss
    model.layers[1].kernel.assign(3 * model.layers[1].kernel)
    after = h @ np.ones(43)
    assert h.loss > 1.01 * loss and np.abs(after - before).max() > 0.01
    fresh = curvature.Hessian(model, x, y, batch_size=16) @ np.ones(43)
    np.testing.assert_allclose(after, fresh, 1e-5, 1e-6)
    model.layers[1].kernel.assign(np.nan * model.layers[1].kernel)
    with pytest.raises(ValueError, match="is nan in batch 0"):
        h @ np.ones(43)


def test_halves_stay_within_their_range():
    x, y, _ = nets.numbers()
    each = []
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        keras.utils.set_random_seed(0)
        hidden = layers.Dense(5, "tanh", dtype=policy)
        last = layers.Dense(3, dtype=policy)
        model = keras.Sequential([layers.Input([4]), hidden, last])
        model.compile(loss=nets.cross_entropy())
        each.append(curvature.Hessian(model, x, y, batch_size=16) @ np.ones(43))
    size = np.abs(each[0]).max()
    np.testing.assert_allclose(each[1], each[0], 0, 0.02 * size)
    np.testing.assert_allclose(each[2], each[0], 0, 0.1 * size)


def test_losses_of_ones_own():
    model, (x, y, _) = made(nets.weighted)
    by_name = curvature.Hessian(model, x, y, loss=nets.cross_entropy(), batch_size=16)

    def loss(model, batch):
        return tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(batch[1], model(batch[0]), True)
        )

    own = curvature.Hessian(model, x, y, loss=loss, batch_size=16)
    np.testing.assert_allclose(own @ np.ones(43), (by_name @ np.ones(43)) - 0.02 * np.repeat(
        [1, 0], [20, 23]), 1e-3, 1e-5)  # fmt: skip


def test_fisher_takes_a_function_that_tells_the_losses_of_rows():
    model, (x, y, _) = made(nets.weighted)

    def losses(model, batch):
        return keras.losses.sparse_categorical_crossentropy(batch[1], model(batch[0]), True)

    def mean(model, batch):
        return tf.reduce_mean(losses(model, batch))

    f = curvature.Fisher(model, x, y, loss=losses, batch_size=16)
    expected = curvature.Fisher(model, x, y, batch_size=16) @ np.ones(43)
    np.testing.assert_allclose(f @ np.ones(43), expected, 1e-4, 1e-6)
    with pytest.raises(ValueError, match="returns the losses of the batch's rows"):
        curvature.Fisher(model, x, y, loss=mean, batch_size=16) @ np.ones(43)


def test_other_numbers_of_columns_are_traced_once():
    model, (x, y, _) = made(nets.weighted)
    h = curvature.Hessian(model, x, y, batch_size=49)
    every = h @ np.eye(43)  # ten times four, and three
    assert h._functions["_products"].experimental_get_tracing_count() == 1
    np.testing.assert_allclose(every[:, 0], h @ np.eye(43)[0], 1e-4, 1e-6)
    told = []
    with h.telling("products", 1):
        h._advance = told.append
        h @ np.eye(43)[:, :6]
    assert sum(told) == 6


def test_sharpness_and_landscapes(in_double, monkeypatch):
    model, (x, y, _) = made(nets.weighted)
    h = curvature.Hessian(model, x, y, batch_size=49)
    found = h.sharpness(rho=1e-3)
    norm = np.linalg.norm(h.gradient)
    assert found.sam == pytest.approx(1e-3 * norm, rel=1e-2)
    assert found.eigenvalue == pytest.approx(np.linalg.eigvalsh(h @ np.eye(43))[-1])
    assert found.keskar > 0
    along = h.landscape(1, radius=1e-2, points=3)
    bend = (along.losses[0] - 2 * along.losses[1] + along.losses[2]) / 1e-4
    assert bend == pytest.approx(found.eigenvalue, rel=1e-2)
    plane = h.landscape(np.eye(43)[:2], points=3)
    assert np.shape(plane.losses) == (3, 3)
    told = []
    with h.telling("landscape", 1, "losses"):
        h._advance = told.append
        h.loss_at(np.zeros(43))
    assert sum(told) == 1
    bars = []
    bar = progress.bar
    monkeypatch.setattr(progress, "bar", lambda *given: bars.append(given[:2]) or bar(*given))
    h.landscape(1, points=3, limit=9)
    assert bars == [("eigenvalues, products", 9), ("landscape, losses", 3)]
    pytest.importorskip("matplotlib")
    assert plane.plot()._repr_png_() and along.plot()._repr_png_()


# ------------------------------------------------------------------------- refusals


def simple(**compiled):
    model = keras.Sequential([layers.Input([4]), layers.Dense(3, name="only")])
    if compiled:
        model.compile(**compiled)
    return model


def sampled(loss, y):
    return curvature.Fisher(simple(loss=loss), X, y, kind="sampled") @ np.ones(15)


def mirrored():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return simple(loss="mse")


def batches_of(x, y):
    yield x, y


X, Y, _ = nets.numbers(10)
NAN = np.where(np.arange(40).reshape(10, 4) == 37, np.nan, X)


@pytest.mark.parametrize(
    ("message", "ask"),
    [
        ("is not compiled", lambda: curvature.Hessian(simple(), X, Y)),
        ("can be read once", lambda: curvature.Hessian(simple(loss="mse"), batches_of(X, Y))),
        ("paths are .*only/kernel", lambda: curvature.Hessian(
            simple(loss="mse"), X, Y, variables="conv")),
        ("batch 2 .from 0. of 3", lambda: curvature.Hessian(
            simple(loss=nets.cross_entropy()), NAN, Y, batch_size=4).loss),
        ("the data have none: give y", lambda: curvature.Hessian(simple(loss="mse"), X)),
        ("no end: give steps", lambda: curvature.Hessian(
            simple(loss="mse"), tf.data.Dataset.from_tensors((X, X[:, :3])).repeat())),
        ("got no data", lambda: curvature.Hessian(
            simple(loss="mse"), tf.data.Dataset.from_tensors((X, X[:, :3])).take(0)).loss),
        ("15 numbers, got an array of shape", lambda: curvature.Hessian(
            simple(loss="mse"), X, X[:, :3]) @ np.ones(3)),
        ("label_smoothing=0.1", lambda: sampled(keras.losses.CategoricalCrossentropy(
            label_smoothing=0.1), X[:, :3])),
        ("ignore_class=1", lambda: sampled(nets.cross_entropy(ignore_class=1), Y)),
        ("axis=1", lambda: sampled(keras.losses.CategoricalCrossentropy(axis=1), X[:, :3])),
        ("for the loss mean_absolute_error", lambda: sampled("mae", X[:, :3])),
        ("MirroredStrategy with 2, which weights", lambda: curvature.Hessian(
            mirrored(), X, X[:, :3])),
        ("kind is 'empirical' or 'sampled'", lambda: curvature.Fisher(
            simple(loss="mse"), X, Y, kind="true"
        )),
    ],
)  # fmt: skip
def test_bad_input_is_refused(message, ask):
    with pytest.raises(ValueError, match=message):
        ask()


def test_variables_that_the_loss_does_not_depend_on_are_named():
    inputs = layers.Input([4])
    used, idle = layers.Dense(3, name="used")(inputs), layers.Dense(2, name="idle")(inputs)
    model = keras.Model(inputs, [used, idle])
    model.compile(loss=[nets.cross_entropy(), None])
    h = curvature.Hessian(model, X, [Y, Y])
    with pytest.raises(ValueError, match="does not depend on .*idle/kernel"):
        h @ np.ones(h.size)


def test_layers_without_second_derivatives_are_named():
    up = layers.UpSampling2D(2, interpolation="bilinear", name="up")
    model = keras.Sequential([layers.Input([4, 4, 1]), layers.Conv2D(1, 3), up, layers.Flatten()])
    model.compile(loss="mse")
    h = curvature.Hessian(model, np.ones([2, 4, 4, 1]), np.ones([2, 16]))
    with pytest.raises(NotImplementedError, match="up.*ResizeBilinearGrad"):
        h @ np.ones(h.size)


def test_data_that_change_are_refused():
    model = simple(loss="mse")
    rng = np.random.default_rng(0)

    def rows():
        yield X + rng.standard_normal(X.shape), X[:, :3]

    noise = tf.data.Dataset.from_generator(rows, output_types=(tf.float32, tf.float32),
                                           output_shapes=([10, 4], [10, 3]))  # fmt: skip
    with pytest.raises(ValueError, match="differ from pass to pass"):
        curvature.Hessian(model, noise) @ np.ones(15)
