"""Inputs of ops of a shape that nobody expects: an error that names them, and not the end of the
process.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers import group

from tfscale.ops import all_reduce, library
from tfscale.ops.optimizers import lamb_numbers, lars_numbers

PAIR = 2


def handle():
    return group(PAIR).communicators[0].handle


PROGRAMS = {  # of the first of two ranks: kind, peer, first chunk, end
    "all_reduce": [[0, 1, 0, 1], [3, 1, 0, 1]],
    "broadcast": [[2, -1, 0, 1], [0, 1, 0, 1]],
    "reduce_scatter": [[0, 1, 1, 2], [1, 1, 0, 1], [2, -1, 0, 1]],
    "all_gather": [[2, -1, 0, 1], [0, 1, 0, 1], [3, 1, 1, 2]],
}


def collective(name, **changed):
    """An op as Python calls it, but for some of its inputs."""
    inputs = {"communicator": handle(), "x": [1.0, 2.0], "seed": np.int64(0)}
    if "reduce" in name:
        inputs["residual"] = []
    return getattr(library.load(), f"tfscale_{name}")(
        **{**inputs, **changed},
        bucket="inputs",
        schedule="inputs",
        ranks=PAIR,
        rank=0,
        chunks=max(last for *_, last in PROGRAMS[name]),
        program=[number for move in PROGRAMS[name] for number in move],
    )


def give_up(**changed):
    inputs = {"communicator": handle(), "reason": "enough", "linger": np.float64(0.1), **changed}
    return library.load().tfscale_give_up(**inputs)


def executions(**changed):
    return library.load().tfscale_executions(
        **{"communicator": handle(), "most": np.int64(1), **changed}
    )


def join(**changed):
    return library.load().tfscale_join(**{"communicator": handle(), **changed})


def totals(**changed):
    return library.load().tfscale_totals(**{"communicator": handle(), **changed})


def variables(*names):
    return {name: tf.Variable([1.0, 2.0]).handle for name in names}


def lamb(**changed):
    inputs = {**variables("var", "m", "v"), "grad": [1.0, 2.0], "hyper": lamb_numbers(0.1)}
    return library.load().tfscale_lamb(**{**inputs, **changed})


def lars(**changed):
    inputs = {**variables("var", "momentum"), "grad": [1.0, 2.0], "hyper": lars_numbers(0.1)}
    return library.load().tfscale_lars(**{**inputs, **changed})


OPS = {
    **{name: (functools.partial(collective, name), ["communicator", "seed"]) for name in PROGRAMS},
    "join": (join, ["communicator"]),
    "give_up": (give_up, ["communicator", "reason", "linger"]),
    "executions": (executions, ["communicator", "most"]),
    "totals": (totals, ["communicator"]),
    "lamb": (lamb, ["var", "m", "v"]),
    "lars": (lars, ["var", "momentum"]),
}
ONE_VALUES = [(op, name) for op, (_, names) in OPS.items() for name in names]
VALUES = {"seed": np.int64(0), "most": np.int64(0), "reason": "", "linger": np.float64(0)}


def several(name, count):
    """What is one value for this input, count times."""
    one = VALUES[name] if name in VALUES else handle()
    return tf.raw_ops.Pack(values=[one] * max(count, 1))[:count]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(("op", "name"), ONE_VALUES)
def test_an_input_that_is_one_value_is_refused_as_a_vector(op, name, count):
    call, _ = OPS[op]
    refusal = f"{name} must be one value|Empty resource handle"  # the latter is TensorFlow's own
    with pytest.raises(tf.errors.InvalidArgumentError, match=refusal):
        call(**{name: several(name, count)})


@pytest.mark.parametrize(("op", "name"), ONE_VALUES)
def test_a_graph_with_it_is_not_made(op, name):
    call, _ = OPS[op]
    pair = several(name, 2)
    step = tf.function(lambda given: call(**{name: given}), autograph=False)
    with pytest.raises(ValueError, match="must be rank 0"):
        step.get_concrete_function(tf.TensorSpec(pair.shape, pair.dtype))


@pytest.mark.parametrize("linger", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_linger_that_is_no_time_is_refused(linger):
    with pytest.raises(tf.errors.InvalidArgumentError, match="linger is a number of seconds"):
        give_up(linger=np.float64(linger))


def test_a_resource_of_another_kind_is_refused():
    other = tf.Variable([1.0]).handle
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="wrong type|Trying to access resource"
    ):
        totals(communicator=other)


@pytest.mark.parametrize("shape", [[], [3], [2, 1]])
def test_a_residual_of_another_shape_is_refused(shape):
    with pytest.raises(tf.errors.InvalidArgumentError, match="residual must have the shape of x"):
        collective("all_reduce", residual=[tf.zeros(shape)])


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather"])
def test_a_scalar_cannot_be_cut_or_joined(op):
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least one dimension"):
        collective(op, x=1.0)


@pytest.mark.parametrize("op", [lamb, lars])
@pytest.mark.parametrize("count", [0, 1])
def test_numbers_of_another_shape_are_refused(op, count):
    with pytest.raises(tf.errors.InvalidArgumentError, match="hyper has shape"):
        op(hyper=tf.zeros([count]))


def test_the_group_goes_on():
    function = group(PAIR).function(lambda c, x: all_reduce(x, c, name="afterwards"))
    for y in function([tf.ones([3])] * PAIR):
        np.testing.assert_array_equal(y, 2)
