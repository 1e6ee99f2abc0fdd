"""Inputs of ops of a shape that nobody expects: an error that names them, and not the end of the
process.
"""

import numpy as np
import pytest
import tensorflow as tf
from helpers import group

from tests.ops.raw_calls import (
    OPS,
    PAIR,
    PROGRAMS,
    arguments,
    call,
    handle,
    run,
    run_in_session,
    variable,
)
from tfscale.native import library
from tfscale.ops import all_reduce

HUGE = 2**40

# Inputs of ops that are one value each.
SINGLE = {
    **{op: ["communicator", "seed"] for op in PROGRAMS},
    "begin": ["communicator", "seed", "flight"],
    "best_classes": [],
    "communicator": [],
    "flight": [],
    "largest": ["residual"],
    "lamb": ["var", "m", "v"],
    "lars": ["var", "momentum"],
    "low_rank_rows": ["residual"],
    "low_rank_columns": ["residual"],
    "low_rank_sum": ["residual", "finite"],
    "sum_at": ["residual", "finite"],
    "take": ["flight"],
    "drop": ["flight"],
    "in_flight": ["flight"],
    "join": ["communicator"],
    "totals": ["communicator"],
    "watch": ["communicator"],
    "ways": ["communicator"],
    "give_up": ["communicator", "reason", "linger"],
    "executions": ["communicator", "most"],
}
ONE_VALUES = [(op, name) for op, names in SINGLE.items() for name in names]
VALUES = {
    "seed": np.int64(0),
    "most": np.int64(0),
    "reason": "",
    "linger": np.float64(0),
    "finite": True,
}


def test_every_op_is_here():
    assert (
        set(OPS)
        == set(SINGLE)
        == {
            name.removeprefix("tfscale_")
            for name in vars(library.load())
            if name.startswith("tfscale_") and not name.endswith("_eager_fallback")
        }
    )


def several(name, count):
    """Return the value of this input, repeated count times."""
    one = VALUES[name] if name in VALUES else handle()
    return tf.raw_ops.Pack(values=[one] * max(count, 1))[:count]


def given_as(op, name, value):
    """Return the value in the op's form: TfscaleLargest has a list of residuals."""
    return [value] if (op, name) == ("largest", "residual") else value


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(("op", "name"), ONE_VALUES)
def test_an_input_that_is_one_value_is_refused_as_a_vector(op, name, count):
    refusal = f"{name} must be one value|Empty resource handle"  # the latter is TensorFlow's own
    with pytest.raises(tf.errors.InvalidArgumentError, match=refusal):
        call(op, **{name: given_as(op, name, several(name, count))})


@pytest.mark.parametrize(("op", "name"), ONE_VALUES)
def test_a_graph_with_it_is_not_made(op, name):
    pair = several(name, 2)
    others = arguments(op)
    step = tf.function(
        lambda given: run(op, {**others, name: given_as(op, name, given)}), autograph=False
    )
    with pytest.raises(ValueError, match="must be rank 0"):
        step.get_concrete_function(tf.TensorSpec(pair.shape, pair.dtype))


def test_classes_without_samples_and_of_huge_sizes_are_refused_or_empty():
    given = {"values": tf.ones([4, 0, 2**61]), "places": tf.zeros([3, 4], tf.int32)}
    with pytest.raises(tf.errors.InvalidArgumentError, match="k is 1, of 3 classes"):
        call("best_classes", **given)
    sums, _ = call("best_classes", values=tf.ones([2, 0, 3]))
    assert sums.shape == [0, 1]


@pytest.mark.parametrize("linger", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_linger_that_is_no_time_is_refused(linger):
    with pytest.raises(tf.errors.InvalidArgumentError, match="linger is a number of seconds"):
        call("give_up", linger=np.float64(linger))


def test_a_resource_of_another_kind_is_refused():
    other = tf.Variable([1.0]).handle
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="wrong type|Trying to access resource"
    ):
        call("totals", communicator=other)


@pytest.mark.parametrize("shape", [[], [3], [2, 1]])
def test_a_residual_of_another_shape_is_refused(shape):
    with pytest.raises(tf.errors.InvalidArgumentError, match="residual must have the shape of x"):
        call("all_reduce", residual=[tf.zeros(shape)])


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather"])
def test_a_scalar_cannot_be_cut_or_joined(op):
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least one dimension"):
        call(op, x=1.0)


@pytest.mark.parametrize("op", ["lamb", "lars"])
@pytest.mark.parametrize("count", [0, 1])
def test_numbers_of_another_shape_are_refused(op, count):
    with pytest.raises(tf.errors.InvalidArgumentError, match="hyper has shape"):
        call(op, hyper=tf.zeros([count]))


@pytest.mark.parametrize(
    ("op", "factor"), [("low_rank_rows", [HUGE, 0]), ("low_rank_columns", [0, HUGE])]
)
def test_a_product_that_no_tensor_can_hold_is_refused(op, factor):
    name = "factor" if op == "low_rank_rows" else "basis"
    given = {"residual": variable(*factor), "x": tf.zeros(factor), name: tf.zeros(factor)}
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"shape \[{HUGE},{HUGE}\], which no"):
        call(op, **given)


@pytest.mark.parametrize("op", ["low_rank_rows", "low_rank_columns", "low_rank_sum"])
def test_a_matrix_of_many_rows_that_hold_nothing_takes_no_time(op):
    matrix, none = [HUGE, 0], tf.zeros([0, 0])
    given = {"residual": variable(*matrix), "x": tf.zeros(matrix)}
    if op == "low_rank_rows":
        assert call(op, **given, factor=none).shape == matrix
    elif op == "low_rank_columns":
        assert call(op, **given, basis=tf.zeros(matrix)).shape == [0, 0]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="no basis"):
            call(op, **given, basis=tf.zeros(matrix), own=none, total=none)


def test_what_is_joined_must_fit_into_a_tensor():
    with pytest.raises(tf.errors.InvalidArgumentError, match="more than one tensor can hold"):
        call("all_gather", x=tf.zeros([2**62, 0]))


@pytest.mark.parametrize("op", ["largest", "take", "all_reduce"])
def test_there_is_one_residual_at_most(op):
    several = {
        "largest": {"residual": [variable(3)] * 2},
        "take": {"lost_types": [tf.float32] * 2},
        "all_reduce": {"residual": [tf.ones([2])] * 2},
    }
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most one residual, got 2"):
        call(op, **several[op])


def test_chunks_without_end_are_refused():
    everything = [0, 1, 0, 2**31 - 1, 3, 1, 0, 2**31 - 1]
    with pytest.raises(tf.errors.InvalidArgumentError, match="from 1 to 1048576 chunks"):
        call("all_reduce", chunks=2**31 - 1, program=everything)


@pytest.mark.parametrize(
    "odd",
    [
        {"first_port": 7, "last_port": 6},
        {"first_port": -1},
        {"last_port": 70_000},
        {"streams": 65},
    ],
)
def test_ports_and_streams_that_make_no_sense_are_refused(odd):
    with pytest.raises(tf.errors.InvalidArgumentError, match="first_port <= last_port <= 65535"):
        call("communicator", **odd)


@pytest.mark.parametrize("op", ["join", "give_up", *PROGRAMS])
def test_in_a_session_nothing_talks_to_other_ranks(op):
    """TensorFlow gives its graphs no executor of collectives."""
    with pytest.raises(tf.errors.FailedPreconditionError, match="no collective executor"):
        run_in_session(op, arguments(op))


def test_the_group_goes_on():
    function = group(PAIR).function(lambda c, x: all_reduce(x, c, name="afterwards"))
    for y in function([tf.ones([3])] * PAIR):
        np.testing.assert_array_equal(y, 2)
