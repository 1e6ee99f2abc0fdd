"""The algebra of shares: dividing by one multiplies by the replica's part, and back."""

import operator

import numpy as np
import pytest
import tensorflow as tf

from tfscale.strategy.share import Share

DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


def share(local=3, total=12, replicas=2):
    return Share(replicas, tf.constant(local, tf.int64), tf.constant(total, tf.int64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_keep_their_type(dtype):
    x = tf.constant([8.0, -2.0], dtype)
    for result, expected in (
        (x / share(), [2, -0.5]),
        (x * share(), [32, -8]),
        (share() * x, [32, -8]),
    ):
        assert result.dtype == dtype
        np.testing.assert_array_equal(tf.cast(result, tf.float64), expected)


def test_float64_is_as_exact_as_it_may_be():
    x = tf.constant(1.0, tf.float64)
    assert x / share(1, 3) == 1 / 3
    assert x * share(3, 1) == 1 / 3


def test_numbers_of_python_become_float32():
    """Python itself would make one divided by an integer, before TensorFlow sees it."""
    for result, expected in ((1.0 / share(), 0.25), (1 / share(), 0.25), (share() * 2, 8)):
        assert result.dtype == tf.float32
        assert result == expected


def test_division_and_multiplication_undo_each_other():
    x = tf.constant([3.0, 7.0])
    np.testing.assert_allclose(x / share(5, 7) * share(5, 7), x, rtol=1e-6)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_a_batch_size_times_the_number_is_the_global_batch(dtype):
    """Uneven shards, and more rows than float32 can count."""
    for local, total in ((5, 11), (1, 3), (333_333_333, 1_000_000_007)):
        for product in (
            tf.constant(local, dtype) * share(local, total),
            share(local, total) * tf.constant(local, dtype),
        ):
            assert product.dtype == dtype
            assert product == total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("total", [12, 0])
def test_a_replica_that_holds_nothing_counts_for_nothing(total, dtype):
    empty = share(0, total)
    for nothing in (empty.part(dtype), empty.count(dtype), 1 / empty, tf.cast(empty, dtype)):
        assert float(nothing) == 0
    x = tf.constant(3.0, dtype)
    for divide in (operator.truediv, tf.divide, tf.function(operator.truediv)):
        assert float(divide(x, empty)) == 0


def test_a_replica_that_holds_nothing_knows_the_global_batch():
    """The replica's sum of no losses, divided by the global batch, is 0."""
    assert tf.constant(0) * share(0, 12) == 12


def test_it_becomes_a_tensor_of_any_float_type():
    assert tf.cast(share(), tf.float32) == 4
    for dtype in DTYPES:
        made = tf.convert_to_tensor(share(), dtype)
        assert made.dtype == dtype
        assert made == tf.constant(4, dtype)
    with pytest.raises(TypeError, match="a share is a ratio"):
        tf.convert_to_tensor(share(), tf.int32)


def test_to_python_it_is_the_number_of_replicas():
    assert int(share()) == 2
    assert float(share()) == 2.0
    assert list(range(share())) == [0, 1]
    assert ["a", "b", "c"][share()] == "c"
    assert f"{share()}" == repr(share()) == "2"
    assert share() == 2
    assert share() != 3
    assert hash(share()) == hash(2)
    assert {2: "two"}[share()] == "two"


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_it_compares_as_the_number_of_replicas(name):
    compare = getattr(operator, name)
    for other in (1, 2, 3):
        assert compare(share(), other) is compare(2, other)
        assert compare(other, share()) is compare(other, 2)


def test_in_a_graph_the_share_is_that_of_each_call():
    @tf.function
    def scaled(x, local):
        return x / Share(2, local, tf.constant(8, tf.int64))

    x = tf.constant(1.0)
    assert [float(scaled(x, tf.constant(n, tf.int64))) for n in (1, 2, 8)] == [0.125, 0.25, 1]
