"""Fused ops: where they are used, and that they compute what plain TensorFlow does."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.common import assert_close, gradients, train, variables
from tfscale.bridge import runtime
from tfscale.native import library
from tfscale.native.toolchain import BuildError
from tfscale.optimizers import LAMB, LARS
from tfscale.training.optimizers import fused

RULES = {
    "lamb": lambda **how: LAMB(0.01, weight_decay=0.1, **how),
    "lamb bounds": lambda **how: LAMB(0.01, trust_bounds=(0.5, 3.0), **how),
    "lamb not corrected": lambda **how: LAMB(0.01, bias_correction=False, **how),
    "lars": lambda **how: LARS(1.0, weight_decay=0.01, **how),
    "lars popular": lambda **how: LARS(1.0, form="popular", epsilon=0.1, **how),
    "lars nesterov": lambda **how: LARS(1.0, nesterov=True, weight_decay=0.01, **how),
    "larc": lambda **how: LARS(0.1, trust_clip=True, trust_coefficient=0.02, **how),
    "larc of a large rate": lambda **how: LARS(2.0, trust_clip=True, **how),
}


@pytest.mark.parametrize("rule", RULES)
def test_fused_and_plain_are_the_same(rule):
    """State included, over 50 steps, in which some gradients and a variable are zero."""
    make, steps = RULES[rule], gradients(50)
    steps[3] = [tf.zeros_like(g) for g in steps[3]]
    ended = []
    for how in (True, False):
        optimizer, of = make(fused=how), variables()
        of[0].assign(tf.zeros_like(of[0]))
        train(optimizer, of, steps)
        ended.append([v.numpy() for v in of + optimizer.variables])
    assert_close(*ended, 1e-6, rule)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_in_half_precision_both_round_the_same_number(rule, dtype):
    """One step: their state is the same, and a variable is the same or its neighbour."""
    ended = []
    for how in (True, False):
        optimizer, of = RULES[rule](fused=how), variables(dtype=dtype)
        found = train(optimizer, of, gradients(1, dtype=dtype))
        ended.append((found, [v.numpy() for v in optimizer.variables[2:]]))
    (fused_ones, fused_state), (plain_ones, plain_state) = ended
    assert all(v.dtype == np.float32 for v in fused_state)
    assert_close(fused_state, plain_state, 1e-6)
    assert_close(fused_ones, plain_ones, {"float16": 2**-10, "bfloat16": 2**-7}[dtype])


@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_compiled_by_xla_it_is_the_same(rule):
    """fused=None takes the op outside, and plain TensorFlow inside."""
    steps, ended = gradients(10), []
    for jit in (False, True):
        optimizer, of = RULES[rule](), variables()
        optimizer.build(of)
        apply = tf.function(
            lambda *grads, optimizer=optimizer: optimizer.apply(list(grads)), jit_compile=jit
        )
        ops = {op.type for op in apply.get_concrete_function(*steps[0]).graph.get_operations()}
        assert any(name.startswith("Tfscale") for name in ops) is not jit
        for grads in steps:
            apply(*grads)
        ended.append([v.numpy() for v in of])
    assert_close(*ended, 1e-6)


def test_eagerly_it_is_the_same():
    ended = []
    for how in (True, False):
        optimizer, of = RULES["lamb"](fused=how), variables()
        for grads in gradients(3):
            optimizer.apply(grads, of)
        ended.append([v.numpy() for v in of])
    assert_close(*ended, 1e-6)


def fake(dtype=tf.float32, device="/job:localhost/replica:0/task:0/device:CPU:0"):
    return SimpleNamespace(name="kernel", dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        (fake(dtype=tf.float64), "kernel is float64, and the op is for float32"),
        (fake(device="/job:localhost/task:0/device:GPU:0"), "kernel lives on .*GPU:0, not on"),
        (fake(device=""), "kernel lives on no device"),
    ],
)
def test_what_the_op_is_not_for(variable, why):
    assert fused.choose("lamb", None, variable) is None
    assert fused.choose("lamb", False, variable) is None
    with pytest.raises(ValueError, match=f"fused=True, but {why}.*Use fused=None"):
        fused.choose("lamb", True, variable)


def test_insisting_under_xla_is_refused():
    optimizer, of = LAMB(fused=True), variables()
    optimizer.build(of)
    apply = tf.function(lambda *grads: optimizer.apply(list(grads)), jit_compile=True)
    with pytest.raises(ValueError, match="fused=True, but XLA compiles this step"):
        apply(*gradients(1)[0])


@pytest.fixture
def no_library(monkeypatch):
    """Pretend that the machine has no compiler, and count how often a build is tried."""
    tried = []

    def load():
        tried.append(1)
        raise BuildError("there is no compiler; install g++")

    monkeypatch.setattr(library, "load", load)
    library.trouble.cache_clear()
    fused._tell_once.cache_clear()
    yield tried
    library.trouble.cache_clear()
    fused._tell_once.cache_clear()


def test_without_a_library_it_warns_once_and_goes_on(no_library, caplog):
    found = train(LAMB(0.01), variables(), gradients(2))
    again = train(LAMB(0.01), variables(), gradients(2))
    plain = train(LAMB(0.01, fused=False), variables(), gradients(2))
    (warning,) = (record for record in caplog.records if record.name == "tfscale")
    assert "are slower: there is no compiler; install g++" in warning.getMessage()
    assert len(no_library) == 1
    for mine, second, other in zip(found, again, plain, strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(mine, second)


def test_without_a_library_insisting_is_refused(no_library, caplog):
    with pytest.raises(BuildError, match="there is no compiler"):
        LAMB(fused=True).apply([tf.ones(2)], [keras.Variable([3.0, 4.0])])
    assert not caplog.records


def test_xla_is_recognised_while_it_traces():
    """TensorFlow's private ``GraphOrParentsInXlaContext``, in a function within a function too."""
    found = []

    @tf.function
    def inner():
        found.append(runtime.is_compiled_by_xla())

    tf.function(inner.python_function, jit_compile=True).get_concrete_function()
    tf.function(lambda: inner(), jit_compile=True).get_concrete_function()
    tf.function(inner.python_function).get_concrete_function()
    found.append(runtime.is_compiled_by_xla())
    assert found == [True, True, False, False]
