"""Properties of quantizers and of dyadic arithmetic, for arrays and for tensors."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from tfscale.analysis.quantize import dyadic, numbers
from tfscale.analysis.quantize.quantizer import Quantizer

REAL = st.floats(-1e4, 1e4, width=32)
ROWS = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 20)), elements=REAL)
BITS = st.sampled_from([2, 3, 4, 8])
quick = settings(max_examples=60, deadline=None)


@quick
@given(ROWS, BITS, st.booleans(), st.sampled_from(numbers.METHODS))
def test_rounding_twice_changes_nothing_more(rows, bits, symmetric, method):
    found = numbers.range_of(rows, bits, symmetric, method)
    once = numbers.integers(rows, found, bits, symmetric)
    real = (once - found.zero[:, None]) * found.scale[:, None]
    np.testing.assert_array_equal(numbers.integers(real, found, bits, symmetric), once)


@quick
@given(ROWS, BITS, st.booleans(), st.sampled_from(numbers.METHODS))
def test_larger_numbers_have_integers_as_large_or_larger(rows, bits, symmetric, method):
    found = numbers.range_of(rows, bits, symmetric, method)
    whole = numbers.integers(np.sort(rows, 1), found, bits, symmetric)
    assert np.all(np.diff(whole, axis=1) >= 0)
    low, high = numbers.limits(bits, symmetric)
    assert whole.min() >= low and whole.max() <= high


@quick
@given(ROWS, BITS, st.booleans())
def test_a_number_moves_by_half_a_step_at_most(rows, bits, symmetric):
    found = numbers.range_of(rows, bits, symmetric)
    scale, zero = found.scale[:, None], found.zero[:, None]
    real = (numbers.integers(rows, found, bits, symmetric) - zero) * scale
    # an asymmetric range may lose half a step at one end, since its zero point is whole
    most = 0.5 if symmetric else 1.0
    assert np.all(np.abs(real - rows) <= most * scale * (1 + 1e-4))


@quick
@given(ROWS, BITS, st.booleans())
def test_zero_stays_zero(rows, bits, symmetric):
    rows = np.concatenate([rows, np.zeros_like(rows[:, :1])], 1)
    found = numbers.range_of(rows, bits, symmetric)
    assert np.all(numbers.integers(rows, found, bits, symmetric)[:, -1] == found.zero)


@quick
@given(ROWS, BITS, st.booleans())
def test_the_range_of_least_error_has_no_more_than_the_full_range(rows, bits, symmetric):
    def error(method):
        found = numbers.range_of(rows, bits, symmetric, method)
        real = numbers.integers(rows, found, bits, symmetric) - found.zero[:, None]
        return np.square(real * found.scale[:, None] - rows).sum()

    assert error("mse") <= error("minmax") * (1 + 1e-5)


# ---------------------------------------------------------------------- tensors


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axes, group", [((), 1), ((1,), 1), ((1,), 4), ((0, 1), 3)])
def test_tensors_are_rounded_as_arrays_are(symmetric, axes, group):
    x = np.random.default_rng(0).standard_normal((5, 6)).astype("float32")
    layer = Quantizer(4, x.shape, axes, group, symmetric=symmetric)
    layer.build(None)
    layer.calibrate(x, "minmax")
    expected = numbers.quantized(x, 4, axis=axes or None, group=group, symmetric=symmetric)
    np.testing.assert_allclose(layer.fake(tf.constant(x)), expected, 1e-6, 1e-6)


def learned(x, bits=3):
    layer = Quantizer(bits, learned=True)
    layer.build(None)
    layer.calibrate(x, "mse")
    return layer


def test_gradients_go_straight_through_inside_of_the_range():
    x = tf.Variable([[-9.0, -0.3, 0.1, 0.4, 9.0]])
    layer = learned(np.array([[-1.0, 1.0]], "float32"))
    with tf.GradientTape() as tape:
        y = layer.fake(x)
    np.testing.assert_array_equal(tape.gradient(y, x), [[0, 1, 1, 1, 0]])


def test_a_learned_scale_that_differs_by_the_order_of_sums_rounds_the_same():
    x = np.random.default_rng(0).standard_normal(100_000).astype("float32")
    layer = learned(np.array([[-1.0, 1.0]], "float32"), bits=8)
    scale = np.asarray(layer.scale)
    before = np.asarray(layer.fake(tf.constant(x)))
    layer.scale.assign(scale * np.float32(1 + 2e-7))
    assert np.any(np.asarray(layer.scale) != scale)
    np.testing.assert_array_equal(layer.fake(tf.constant(x)), before)


def test_a_learned_scale_has_the_gradient_of_its_paper():
    x = tf.constant([[-9.0, -0.3, 0.1, 0.4, 9.0]])
    layer = learned(np.array([[-1.0, 1.0]], "float32"))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(layer.fake(x))
    scale = float(np.asarray(layer.scales()))
    inside = np.array([-0.3, 0.1, 0.4]) / scale
    expected = (np.rint(inside) - inside).sum() - 3 + 3
    found = tape.gradient(y, [layer.scale.value])[0]
    np.testing.assert_allclose(found, [expected / np.sqrt(5 * 3)], 1e-4)


# ---------------------------------------------------------------------- dyadic numbers

FACTOR = st.floats(1e-12, 1e3)
WHOLE = st.integers(1 - 2**31, 2**31 - 1)


@quick
@given(FACTOR)
def test_a_dyadic_number_is_near(factor):
    b, c = dyadic.dyadic(np.float64(factor))
    assert 2 ** (dyadic.BITS - 1) <= b < 2**dyadic.BITS
    assert abs(float(b) * 2.0 ** -float(c) - factor) <= factor * 2.0**-dyadic.BITS


@settings(max_examples=20, deadline=None)
@given(st.lists(FACTOR, min_size=5, max_size=5), st.lists(WHOLE, min_size=20, max_size=20))
def test_integers_and_real_numbers_rescale_alike(factors, whole):
    factors, whole = np.array(factors), np.array(whole, np.int64)[:, None]
    real = dyadic.round_half_up(
        tf.constant(whole, tf.float64) * dyadic.dyadic_tensor(tf.constant(factors, tf.float64))
    )
    expected = dyadic.rescaled(whole, dyadic.dyadic(factors))
    inside = np.abs(expected) < 2**51  # far above what the grid holds
    np.testing.assert_array_equal(np.asarray(real)[inside], expected[inside])


@quick
@given(st.floats(1e-6, 1e6))
def test_the_grid_holds_four_times_the_largest_number(largest):
    step = dyadic.grid_step(largest)
    assert np.log2(step) == int(np.log2(step))
    assert 2 * largest <= dyadic.LARGEST_ON_GRID * step <= 16 * largest
