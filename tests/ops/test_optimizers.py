"""The fused updates against the papers' formulas in float64, and their manners as ops."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import tensorflow as tf
from helpers import mirrored

from tfscale.native.optimizers import DTYPES, lamb, lamb_numbers, lars, lars_numbers

SIZES = [0, 1, 7, 1000, 1_000_003]
HALF_STEP = {tf.float32: 0.0, tf.bfloat16: 2.0**-8, tf.float16: 2.0**-11}

# Of what the update computes with float32, on numbers around 1.
ROUNDING = 1e-6


# -------------------------------------------------------------------- reference


def norm(x):
    return np.sqrt(np.sum(np.square(x)))


@dataclass
class LambReference:
    """Reference of LAMB in float64, from the paper."""

    learning_rate: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.999
    correction_1: float = 1.0
    correction_2: float = 1.0
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    lower: float = 0.0
    upper: float = float("inf")
    adapt: bool = field(default=True, kw_only=True)

    def step(self, w, m, v, g):
        m = self.beta_1 * m + (1 - self.beta_1) * g
        v = self.beta_2 * v + (1 - self.beta_2) * g**2
        u = self.correction_1 * m / (np.sqrt(self.correction_2 * v) + self.epsilon)
        u = u + self.weight_decay * w
        ratio = 1.0
        if self.adapt and norm(w) > 0 and norm(u) > 0:
            ratio = np.clip(norm(w), self.lower, self.upper) / norm(u)
        return w - self.learning_rate * ratio * u, m, v

    def apply(self, w, m, v, g):
        numbers = {k: x for k, x in vars(self).items() if k != "adapt"}
        lamb(w, m, v, g, lamb_numbers(**numbers), adapt=self.adapt)


@dataclass
class LarsReference:
    learning_rate: float = 0.1
    momentum: float = 0.9
    trust_coefficient: float = 0.01
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    adapt: bool = field(default=True, kw_only=True)
    nesterov: bool = field(default=False, kw_only=True)
    rate_inside: bool = field(default=True, kw_only=True)
    clip: bool = field(default=False, kw_only=True)

    def step(self, w, m, g):
        ratio = 1.0
        if self.adapt and norm(w) > 0 and norm(g) > 0:
            scale = norm(g) + self.weight_decay * norm(w) + self.epsilon
            ratio = self.trust_coefficient * norm(w) / scale
        if self.clip:
            ratio = min(ratio / self.learning_rate, 1.0)
        d = g + self.weight_decay * w
        if self.rate_inside:
            m = self.momentum * m + self.learning_rate * ratio * d
            ahead = self.momentum * m + self.learning_rate * ratio * d
            return w - (ahead if self.nesterov else m), m
        m = self.momentum * m + ratio * d
        ahead = self.momentum * m + ratio * d
        return w - self.learning_rate * (ahead if self.nesterov else m), m

    def apply(self, w, m, g):
        switches = ("adapt", "nesterov", "rate_inside", "clip")
        numbers = {k: x for k, x in vars(self).items() if k not in switches}
        chosen = {k: getattr(self, k) for k in switches}
        lars(w, m, g, lars_numbers(**numbers), **chosen)


def weights(size, dtype=tf.float32, seed=0):
    rng = np.random.default_rng(seed)
    return tf.Variable(tf.cast(0.3 * rng.standard_normal(size), dtype))


def gradients(size, dtype=tf.float32, seed=1):
    rng = np.random.default_rng(seed)
    return tf.cast(0.1 * rng.standard_normal(size), dtype)


def state(size, seed=2):
    """Return a state that is not negative, as a second moment is."""
    rng = np.random.default_rng(seed)
    return tf.Variable(np.abs(0.1 * rng.standard_normal(size)).astype(np.float32))


def in_float64(*tensors):
    return [tf.cast(tensor, tf.float64).numpy() for tensor in tensors]


def assert_close(tensor, expected):
    (found,) = in_float64(tensor)
    allowed = ROUNDING * (1 + np.abs(expected)) + HALF_STEP[tensor.dtype] * np.abs(expected)
    assert found.shape == expected.shape
    worst = np.max(np.abs(found - expected) - allowed, initial=0)
    assert worst <= 0, f"{worst} more than rounding explains"


def assert_is_the_rule(rule, variables, gradient):
    expected = rule.step(*in_float64(*variables), *in_float64(gradient))
    rule.apply(*variables, gradient)
    for variable, value in zip(variables, expected):
        assert_close(variable, value)


# ------------------------------------------------------------------------ rules


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_lamb_is_the_rule(dtype, size):
    rule = LambReference(correction_1=2.0, correction_2=3.0, weight_decay=0.1)
    variables = weights(size, dtype), state(size), state(size, seed=3)
    assert_is_the_rule(rule, variables, gradients(size, dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_lars_is_the_rule(dtype, size):
    rule = LarsReference(weight_decay=0.1)
    assert_is_the_rule(rule, (weights(size, dtype), state(size)), gradients(size, dtype))


@pytest.mark.parametrize(
    "changed",
    [
        {"adapt": False},
        {"adapt": False, "weight_decay": 0.1},
        {"lower": 20.0},
        {"upper": 0.5},
        {"epsilon": 0.1},
        {"beta_1": 0.0},
        {"learning_rate": 0.0},
    ],
    ids=str,
)
def test_lamb_with_other_numbers(changed):
    variables = weights((20, 50)), state((20, 50)), state((20, 50), seed=3)
    assert_is_the_rule(LambReference(**changed), variables, gradients((20, 50)))


@pytest.mark.parametrize("rate_inside", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"adapt": False},
        {"clip": True},
        {"clip": True, "learning_rate": 1e-3},
        {"clip": True, "adapt": False, "learning_rate": 2.0},
        {"epsilon": 10.0},
        {"momentum": 0.0},
    ],
    ids=str,
)
def test_lars_with_other_numbers(changed, nesterov, rate_inside):
    rule = LarsReference(weight_decay=0.1, nesterov=nesterov, rate_inside=rate_inside, **changed)
    assert_is_the_rule(rule, (weights((20, 50)), state((20, 50))), gradients((20, 50)))


@pytest.mark.parametrize("zero", ["weights", "gradients", "both"])
def test_a_norm_of_zero_makes_the_ratio_one(zero):
    w, g = weights(100), gradients(100)
    if zero != "gradients":
        w.assign(tf.zeros_like(w))
    if zero != "weights":
        g = tf.zeros_like(g)
    copy = tf.Variable(w)
    assert_is_the_rule(LarsReference(weight_decay=0.1), (w, state(100)), g)
    assert_is_the_rule(
        LambReference(weight_decay=0.1), (copy, state(100), tf.Variable(tf.zeros(100))), g
    )


def corrections(rule, t):
    return 1 / (1 - rule.beta_1**t), 1 / (1 - rule.beta_2**t)


def test_lamb_stays_with_the_rule_over_many_steps():
    rule = LambReference(weight_decay=0.01)
    variables = weights(5000), tf.Variable(tf.zeros(5000)), tf.Variable(tf.zeros(5000))
    expected = in_float64(*variables)
    for t in range(1, 201):
        rule.correction_1, rule.correction_2 = corrections(rule, t)
        rule.learning_rate = 0.01 * t / 200
        g = gradients(5000, seed=t)
        rule.apply(*variables, g)
        expected = rule.step(*expected, *in_float64(g))
    (found,) = in_float64(variables[0])
    assert norm(found - expected[0]) <= 1e-6 * norm(expected[0])


# --------------------------------------------------------------------- the op


def test_graph_and_eager_give_the_same_bits_denormals_too():
    def trained(run):
        w, m, v = weights(100_000), state(100_000), state(100_000, seed=3)
        m.assign(m * 1e-38)
        g = gradients(100_000) * 1e-20

        def step():
            for _ in range(3):
                LambReference(weight_decay=0.1).apply(w, m, v, g)
                LarsReference(nesterov=True).apply(w, m, g)

        run(step)()
        return [x.numpy().tobytes() for x in (w, m, v)]

    assert trained(lambda step: step) == trained(tf.function)


def test_one_graph_takes_numbers_that_change():
    @tf.function
    def step(rate, g):
        lars(w, m, g, lars_numbers(rate, momentum=tf.constant(0.5, tf.float64)))

    w, m = weights(30), state(30)
    for rate in (0.1, 0.2, 0.0):
        g = gradients(30, seed=int(rate * 10))
        expected = LarsReference(rate, momentum=0.5, trust_coefficient=0.001, epsilon=0.0).step(
            *in_float64(w, m, g)
        )
        step(tf.constant(rate), g)
        assert_close(w, expected[0])
        assert_close(m, expected[1])
    assert step.experimental_get_tracing_count() == 1


def test_ops_on_one_variable_run_in_program_order():
    @tf.function
    def steps(w, m, v, g):
        before = w.read_value()
        LambReference().apply(w, m, v, g)
        between = w.read_value()
        LarsReference().apply(w, m, g)
        return before, between, w.read_value()

    w, m, v = weights(50_000), state(50_000), state(50_000, seed=3)
    g = gradients(50_000)
    start, *moments = in_float64(w, m, v)
    first = LambReference().step(start, *moments, *in_float64(g))
    second = LarsReference().step(first[0], first[1], *in_float64(g))
    before, between, after = steps(w, m, v, g)
    np.testing.assert_array_equal(before, start.astype(np.float32))
    assert_close(between, first[0])
    assert_close(after, second[0])


def test_a_gradient_that_is_a_slice():
    whole = gradients(10_007)
    for start in (1, 2, 3, 16):
        assert_is_the_rule(LarsReference(), (weights(9_000), state(9_000)), whole[start:][:9_000])


def test_a_gradient_that_is_the_variable_itself():
    w, m = weights(1000), state(1000)
    assert_is_the_rule(LarsReference(), (w, m), w.read_value())


def test_not_finite_gradients_stay_in_their_place():
    g = tf.tensor_scatter_nd_update(gradients(100), [[40]], [np.nan])
    w, m, v = weights(100), state(100), state(100)
    LambReference(weight_decay=0.1).apply(w, m, v, g)
    assert np.flatnonzero(np.isnan(w.numpy())).tolist() == [40]
    w, m = weights(100), state(100)
    LarsReference(weight_decay=0.1).apply(w, m, g)
    assert np.flatnonzero(np.isnan(w.numpy())).tolist() == [40]


PROGRAM_WITH_THREADS = """
import hashlib, sys
import numpy as np, tensorflow as tf
from tfscale.native.optimizers import lamb, lamb_numbers, lars, lars_numbers
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
rng = np.random.default_rng(0)
size = 1_000_003
for dtype in (tf.float32, tf.bfloat16, tf.float16):
    w = tf.Variable(tf.cast(rng.standard_normal(size), dtype))
    g = tf.cast(rng.standard_normal(size), dtype)
    m, v = tf.Variable(tf.zeros(size)), tf.Variable(tf.zeros(size))
    for _ in range(3):
        lamb(w, m, v, g, lamb_numbers(0.01, weight_decay=0.1))
        lars(w, m, g, lars_numbers(0.1, weight_decay=0.1))
    for x in (w, m, v):
        print(hashlib.sha256(tf.cast(x, tf.float32).numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_bits_depend_neither_on_threads_nor_on_the_instruction_set():
    def start(threads, level):
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM_WITH_THREADS, threads],
            env={**os.environ, "PYTHONPATH": path, "TFSCALE_SIMD": level},
            stdout=subprocess.PIPE,
            text=True,
        )

    # "portable" is SSE2 or NEON, too; "" is the best that there is.
    processes = [start("1", "portable"), start("5", "")]
    one, many = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(one.split()) == 9
    assert one == many


# ---------------------------------------------------------------------- readers


def test_readers_keep_the_old_numbers():
    w, m, v = weights(1000), state(1000), state(1000, seed=3)
    held = [x.read_value() for x in (w, m, v)]
    old = [x.numpy().copy() for x in held]
    assert_is_the_rule(LambReference(), (w, m, v), gradients(1000))
    assert_is_the_rule(LarsReference(), (w, m), gradients(1000))
    for tensor, numbers in zip(held, old):
        np.testing.assert_array_equal(tensor.numpy(), numbers)


def test_after_a_sparse_update_readers_keep_the_old_numbers_too():
    w, m = weights(1000), state(1000)
    w.scatter_sub(tf.IndexedSlices(tf.ones(1), [3]))  # from now on reads are copies
    held = w.read_value()
    old = held.numpy().copy()
    assert_is_the_rule(LarsReference(), (w, m), gradients(1000))
    np.testing.assert_array_equal(held.numpy(), old)


def test_nobody_reads_half_an_update():
    size = 300_000
    w, m = tf.Variable(tf.ones(size)), tf.Variable(tf.zeros(size))
    g = tf.ones(size)
    torn = []
    done = threading.Event()

    def read():
        while not done.is_set():
            value = w.read_value().numpy()
            if value.min() != value.max():
                torn.append(value)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(50):
            LarsReference().apply(w, m, g)
    finally:
        done.set()
        reader.join()
    assert not torn


def test_two_threads_that_name_the_state_in_another_order_do_not_block_each_other():
    w, m, v = weights(1000), state(1000), state(1000, seed=3)
    g = gradients(1000)
    numbers = lamb_numbers(0.001)

    def update(first, second):
        for _ in range(300):
            lamb(w, first, second, g, numbers)

    threads = [threading.Thread(target=update, args=order) for order in ((m, v), (v, m))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not any(thread.is_alive() for thread in threads)


def test_replicas_update_their_own_copies():
    strategy = mirrored()
    with strategy.scope():
        w, m = weights(1000), state(1000)
    expected = LarsReference().step(*in_float64(w, m, gradients(1000)))

    @tf.function
    def step():
        strategy.run(lambda: LarsReference().apply(w, m, gradients(1000)))

    step()
    for local in strategy.experimental_local_results(w):
        assert_close(local, expected[0])
    assert len(strategy.experimental_local_results(w)) == 2


# --------------------------------------------------------------------- refusals


def lars_step(w, m, g):
    lars(w, m, g, lars_numbers(0.1))


def test_refuses_a_gradient_of_another_shape():
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"TfscaleLars: var \('.*'\) is float\[2,3\], expected float\[3,2\]",
    ):
        lars_step(weights((2, 3)), state((2, 3)), gradients((3, 2)))


def test_refuses_it_already_when_a_graph_is_made():
    w, m, g = weights((2, 3)), state((2, 3)), gradients((3, 2))
    with pytest.raises(ValueError, match="Dimension 0 in both shapes must be equal"):
        tf.function(lars_step).get_concrete_function(w, m, g)


def test_refuses_a_gradient_of_another_type():
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"var \('.*'\) is float\[3\], expected half\[3\]",
    ):
        lars_step(weights(3), state(3), gradients(3, tf.float16))


def test_refuses_state_that_is_not_float32():
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"momentum \('.*'\) is half\[3\], expected float\[3\].*state is float32",
    ):
        lars_step(weights(3, tf.float16), weights(3, tf.float16), gradients(3, tf.float16))


def test_refuses_one_variable_for_two():
    w = weights(3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be 2 different variables"):
        lars_step(w, w, gradients(3))
    m = state(3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be 3 different variables"):
        lamb(w, m, m, gradients(3), lamb_numbers(0.1))


def test_refuses_a_variable_without_a_value():
    class Empty:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[3], shared_name="no value yet")

    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match=r"TfscaleLars: momentum \('no value yet'\) has no value yet; initialise",
    ):
        lars_step(weights(3), Empty, gradients(3))


def test_refuses_the_numbers_of_the_other_rule():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"hyper has shape \[11\].*\[5\]"):
        lars(weights(3), state(3), gradients(3), lamb_numbers(0.1))


def test_a_refused_update_changes_nothing():
    w, m = weights(3), state(3)
    before = [x.numpy() for x in (w, m)]
    with pytest.raises(tf.errors.InvalidArgumentError):
        lars_step(w, m, gradients(4))
    for x, old in zip((w, m), before):
        np.testing.assert_array_equal(x.numpy(), old)
