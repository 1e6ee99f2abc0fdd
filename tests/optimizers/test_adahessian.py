"""AdaHessian's rule, given D: closed forms and a reference in float64."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.common import SHAPES, assert_close, gradients, variables
from tfscale.analysis.curvature.probes import signs
from tfscale.training.optimizers.adahessian import AdaHessian

# -------------------------------------------------------------------- closed forms


def parabolas(w):
    return tf.reduce_sum([5.0, 70.0, 0.25] * (w - [1.0, 2.0, 3.0]) ** 2)


def step(optimizer, loss, w):
    with optimizer.recording():
        with tf.GradientTape() as tape:
            value = loss(w)
        optimizer.apply(tape.gradient(value, [w]), [w])


@pytest.mark.parametrize("in_graph", [True, False])
def test_the_first_step_down_parabolas_is_newtons(in_graph):
    w = keras.Variable([-4.0, 30.0, 3.5], name="kernel")
    optimizer = AdaHessian(learning_rate=1.0, epsilon=0.0)
    optimizer.build([w])

    def once():
        step(optimizer, parabolas, w)

    (tf.function(once) if in_graph else once)()
    np.testing.assert_allclose(w, [1, 2, 3], rtol=1e-5)
    curvature = np.sqrt(optimizer._velocities[0].numpy() / (1 - 0.999))
    np.testing.assert_allclose(curvature, [10, 140, 0.5], rtol=1e-5)


# --------------------------------------------------- a reference, from the paper


class Reference:
    """Algorithm 1 of arXiv:2006.00719 in float64, with the curvature given."""

    def __init__(self, w, *, decay=0.0, power=1.0, each=1, b1=0.9, b2=0.999, eps=1e-4):
        self.w, self.m, self.v = np.array(w, np.float64), 0.0, 0.0
        self.decay, self.power, self.each = decay, power, each
        self.b1, self.b2, self.eps, self.t = b1, b2, eps, 0

    def step(self, g, d, rate):
        """``d`` counts for as many steps as share it, all of which come at once."""
        g, d = np.asarray(g, np.float64), np.asarray(d, np.float64)
        if self.t % self.each == 0:
            for _ in range(self.each):
                self.v = self.b2 * self.v + (1 - self.b2) * d**2
        counted = (self.t // self.each + 1) * self.each
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        size = (self.v / (1 - self.b2**counted)) ** (self.power / 2)
        move = self.m / (1 - self.b1**self.t) / (size + self.eps)
        self.w = self.w - rate * (move + self.decay * self.w)


CASES = {
    "plain": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {"decay": 0.1}),
    "power": ({"hessian_power": 0.5, "weight_decay": 0.1}, {"power": 0.5, "decay": 0.1}),
    "no power": ({"hessian_power": 0.0}, {"power": 0.0}),
    "each third": ({"update_each": 3}, {"each": 3}),
    "others": ({"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.1}, dict(b1=0.8, b2=0.9, eps=0.1)),
}


@pytest.mark.one_in(2)
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
            optimizer.apply(g, found)

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


def test_variables_in_bfloat16_have_float32_state():
    w = keras.Variable([1.0, 2.0], dtype="bfloat16", name="kernel")
    optimizer = AdaHessian(learning_rate=0.5, epsilon=0.0)
    optimizer.build([w])
    with optimizer.given([tf.constant([2.0, 4.0], tf.bfloat16)]):
        optimizer.apply([tf.constant([1.0, 1.0], tf.bfloat16)], [w])
    np.testing.assert_array_equal(w.numpy().astype(np.float32), [0.75, 1.875])
    assert optimizer._velocities[0].dtype == "float32"


# --------------------------------------------------------------------------- signs


def draw(name=(0, 1, 2), step=3, shape=(50, 41), dtype="float32"):
    return signs(shape, dtype, name, tf.constant(step, tf.int64))


def test_signs_are_the_same_in_graph_eagerly_and_under_xla():
    compiled = tf.function(draw, jit_compile=True)()
    np.testing.assert_array_equal(draw(), tf.function(draw)())
    np.testing.assert_array_equal(draw(), compiled)


@pytest.mark.parametrize("other", [{"name": (0, 1, 3)}, {"name": (1, 1, 2)}, {"step": 4}])
def test_signs_of_other_names_and_steps_are_independent(other):
    one, two = draw().numpy(), draw(**other).numpy()
    assert set(np.unique(one)) == {-1, 1}
    five_sigma = 5 / np.sqrt(one.size)
    for mean in (np.mean(one), np.mean(one * two), np.mean(one[:, 1:] * one[:, :-1])):
        assert abs(mean) < five_sigma


@pytest.mark.parametrize("shape", [(), (1,), (32,), (33, 1), (0, 3)])
def test_signs_come_in_every_shape(shape):
    found = draw(shape=shape, dtype="float16")
    assert found.shape == shape and found.dtype == tf.float16
    assert np.all(np.abs(found) == 1)


# ----------------------------------------------------------------------- averaging


def square_of(d, averaging, name="kernel"):
    """Return the part of v that comes from a curvature, apart from its weight."""
    w = keras.Variable(np.zeros(np.shape(d), np.float32), name=name)
    optimizer = AdaHessian(averaging=averaging, beta_2=0.0)
    optimizer.build([w])
    with optimizer.given([tf.constant(d, tf.float32)]):
        optimizer.apply([tf.ones_like(w)], [w])
    return optimizer._velocities[0].numpy()


@keras.saving.register_keras_serializable("tfscale-tests")
def mean_of_all(d, variable):
    return tf.reduce_mean(d)


@pytest.mark.parametrize(
    ("averaging", "shape", "axes"),
    [
        ("auto", (3, 2, 4, 5), (0, 1)),
        ("auto", (2, 3, 2, 4, 5), (0, 1, 2)),
        ("auto", (3, 4, 5), ()),
        ("auto", (4, 5), ()),
        (None, (3, 2, 4, 5), ()),
        ("window", (3, 4, 5), (0,)),
        ("inputs", (4, 5), (0,)),
        ("outputs", (4, 5), (1,)),
        ({"bias": None, "^kern": "inputs"}, (4, 5), (0,)),
        ({"bias": "inputs"}, (3, 2, 4, 5), (0, 1)),
        (mean_of_all, (4, 5), (0, 1)),
    ],
)
def test_neighbours_share_the_mean(averaging, shape, axes):
    d = np.random.default_rng(0).standard_normal(shape)
    expected = np.broadcast_to(np.mean(d, axes, keepdims=True) ** 2, shape)
    np.testing.assert_allclose(square_of(d, averaging), expected, rtol=1e-5)


def test_blocks_share_the_mean():
    found = square_of([[1.0, 3.0, 5.0], [7.0, -1.0, 1.0]], 2)
    np.testing.assert_allclose(found, [[4, 4, 36], [36, 0, 0]])


@pytest.mark.parametrize(
    ("averaging", "message"),
    [
        (4, r"blocks of 4 do not divide the 6 numbers of kernel"),
        ("window", r'kernel has the shape \(2, 3\), and "window" is for'),
    ],
)
def test_a_rule_that_does_not_fit_the_shape_is_refused(averaging, message):
    with pytest.raises(ValueError, match=message):
        square_of(np.zeros((2, 3)), averaging)


def test_a_pattern_that_is_found_nowhere_is_told(caplog):
    square_of(np.zeros((2, 3)), {"konv": "inputs"})
    assert "averaging: 'konv' is found in no variable's path" in caplog.text


# ----------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta_1": 1.0}, "beta_1 is a number, 0 or more and less than 1; got 1.0"),
        ({"beta_2": -0.1}, "beta_2 is a number, 0 or more"),
        ({"epsilon": -1e-6}, "epsilon is a number, 0 or more; got -1e-06"),
        ({"hessian_power": 1.5}, "hessian_power is a number, from 0 to 1; got 1.5"),
        ({"samples": 0}, "samples is a whole number, 1 or more; got 0"),
        ({"update_each": 2.0}, "update_each is a whole number, 1 or more; got 2.0"),
        ({"seed": -1}, "seed is a whole number, 0 or more; got -1"),
        ({"averaging": "rows"}, "averaging is .* got 'rows'"),
        ({"averaging": {"kernel": 0}}, "averaging is .* got 0"),
        ({"averaging": {"(": None}}, "a key of averaging is a regular expression"),
    ],
)
def test_a_refusal_says_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaHessian(**arguments)


# All but the averaging, and none as it is by default.
ARGUMENTS = {
    "learning_rate": 0.5,
    "beta_1": 0.8,
    "beta_2": 0.9,
    "epsilon": 0.125,
    "weight_decay": 0.25,
    "hessian_power": 0.5,
    "samples": 2,
    "update_each": 3,
    "seed": 7,
    "exclude_from_weight_decay": ["gamma"],
    "clipnorm": 2.0,
}


@pytest.mark.parametrize("averaging", [{"a": 4, "b": None}, mean_of_all, "inputs", 8])
def test_every_argument_is_saved(averaging):
    given = {**ARGUMENTS, "averaging": averaging}
    saved = json.loads(json.dumps(keras.saving.serialize_keras_object(AdaHessian(**given))))
    again = keras.saving.deserialize_keras_object(saved)
    config = again.get_config()
    assert again.averaging == averaging
    assert {k: config[k] for k in given if k != "averaging"} == {
        k: v for k, v in given.items() if k != "averaging"
    }
