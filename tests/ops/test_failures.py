"""Ranks that disagree, are late or fail: an error that names them, and then life goes on."""

import re
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers import PATIENCE, assert_disagreement, group, integers, slowly

from tfscale.collectives import ring
from tfscale.native import library
from tfscale.native.library import known_to_all
from tfscale.ops import Group, all_gather, all_reduce, broadcast, reduce_scatter


def assert_goes_on(group):
    xs = integers(group.ranks, 33)
    function = group.function(lambda c, x: all_reduce(x, c, name="afterwards"))
    for _ in range(2):
        for y in function(xs):
            np.testing.assert_array_equal(y, sum(xs))


def test_ranks_that_came_one_after_the_other_can_still_come_together():
    group = Group.local(["CPU:0", "CPU:1"], deadline=3)
    for communicator in group.communicators:
        with pytest.raises(tf.errors.DeadlineExceededError), tf.device(communicator.device):
            library.load().tfscale_join(communicator.handle)
    assert_goes_on(group)


def odd(communicator, other, usual):
    """The last rank differs from all others."""
    return other if communicator.rank == communicator.ranks - 1 else usual


DISAGREEMENTS = {
    "size": (lambda c, x: all_reduce(x[: odd(c, 5, 6)], c), ["[5]", "[6]"]),
    "none at all": (lambda c, x: all_reduce(x[: odd(c, 0, 6)], c), ["[0]", "[6]"]),
    "shape": (lambda c, x: all_reduce(tf.reshape(x, odd(c, [2, 6], [12])), c), ["[2,6]", "[12]"]),
    "type": (
        lambda c, x: all_reduce(tf.cast(x, odd(c, "int32", "float32")), c),
        ["int32", "float"],
    ),
    "wire": (lambda c, x: all_reduce(x, c, wire=odd(c, "int8", "fp32")), ["int8", "fp32"]),
    "schedule": (lambda c, x: all_reduce(x, c, schedule=odd(c, "tree", "ring")), ["tree", "ring"]),
    "reduction": (
        lambda c, x: all_reduce(x, c, reduction=odd(c, "mean", "sum")),
        ["all_reduce mean", "all_reduce sum"],
    ),
    "residual": (
        lambda c, x: all_reduce(x, c, residual=odd(c, x, None)),
        ["with a residual"],
    ),
    "rounding": (
        lambda c, x: all_reduce(x, c, wire="int8", stochastic=odd(c, True, False)),
        ["stochastic"],
    ),
    "root": (lambda c, x: broadcast(x, c, root=odd(c, 1, 0)), ["broadcast"]),
    "operation": (
        lambda c, x: odd(c, all_gather, all_reduce)(x, c, name="both"),
        ["all_gather", "all_reduce"],
    ),
    "rows": (lambda c, x: reduce_scatter(x[: odd(c, 6, 12)], c), ["[6]", "[12]"]),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_refused_by_name(what, ranks):
    """The error comes at once: a rank that waits for the deadline gets another error."""
    body, words = DISAGREEMENTS[what]
    body_with_list = group(ranks).function(lambda c, x: tf.nest.flatten(body(c, x)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="ranks do not agree") as error:
        body_with_list([tf.range(12.0)] * ranks)
    assert known_to_all(error.value)
    message = str(error.value)
    assert_disagreement(message, odd=ranks - 1)
    for word in words:
        assert word in message
    assert_goes_on(group(ranks))


def test_errors_of_one_rank_alone_are_told_from_those_of_which_all_hear():
    communicator = group(2).communicators[0]
    rows = tf.TensorSpec([None, 2])  # how many is known when the op runs

    @tf.function(input_signature=[rows], autograph=False)
    def reduced(residual):
        return all_reduce(tf.ones([2, 2]), communicator, residual=residual, wire="int8")

    with pytest.raises(tf.errors.InvalidArgumentError, match="residual must have the shape") as own:
        reduced(tf.ones([3, 2]))
    assert not known_to_all(own.value)
    assert not known_to_all(tf.errors.CancelledError(None, None, "rank 0 (CPU:0) gave up"))
    marked = tf.errors.CancelledError(None, None, "", {b"tfscale/known-to-all": b"1"})
    try:
        try:
            raise marked
        except tf.errors.OpError:  # as Keras does, where a layer's call fails
            raise RuntimeError("while calling a layer") from None
    except RuntimeError as error:
        assert known_to_all(error)


def test_a_rank_that_does_not_come_is_named_and_life_goes_on():
    quick = Group.local(["CPU:0", "CPU:1", "CPU:2"], deadline=3.0)
    assert_goes_on(quick)

    @quick.function
    def two_of_three(communicator, x):
        return x if communicator.rank == 1 else all_reduce(x, communicator, name="lonely")

    with pytest.raises(tf.errors.DeadlineExceededError) as error:
        two_of_three(integers(3, 8))
    waited = re.findall(r"bucket 'lonely': no progress for (\S+) s", str(error.value))
    assert waited and all(float(seconds) >= 3 for seconds in waited)
    assert "rank 1 (CPU:1)" in str(error.value)
    assert_goes_on(quick)


def test_a_slow_rank_is_waited_for():
    """Longer than a stall, shorter than the deadline."""

    def body(communicator, x):
        x = tf.convert_to_tensor(x)
        return all_reduce(slowly(x, 1.2) if communicator.rank else x, communicator, name="slow")

    xs = integers(3, 8)
    for y in group(3).function(body)(xs):
        np.testing.assert_array_equal(y, sum(xs))


@pytest.mark.parametrize("reason", ["no more data", "", "long " * 1000])
def test_giving_up_where_nothing_runs_harms_no_later_step(reason):
    """All ranks are of this process, and leave together."""
    for _ in range(2):
        group(3).give_up(reason)
        assert_goes_on(group(3))


def test_one_rank_may_give_up_alone():
    alone = Group.local(["CPU:0"])
    alone.give_up("enough")
    np.testing.assert_array_equal(all_reduce([1.0], alone.communicators[0]), [1])


def test_giving_up_ends_what_runs_in_another_thread():
    """A step that waits for a rank of its own process."""
    pair = Group.local(["CPU:0", "CPU:1"], deadline=PATIENCE)
    assert_goes_on(pair)
    only_one = pair.function(lambda c, x: x if c.rank else all_reduce(x, c, name="lonely"))
    errors = []

    def run():
        try:
            only_one([tf.ones([3])] * 2)
        except tf.errors.CancelledError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    while not errors and thread.is_alive():
        pair.give_up("enough", linger=0.1)  # again and again: the step may not have begun
        time.sleep(0.1)
    thread.join(PATIENCE)
    assert "rank 0 (CPU:0) gave up: enough" in errors[0]
    assert_goes_on(pair)


def test_a_group_that_never_comes_together():
    lonely = Group.local(["CPU:0", "CPU:1"], deadline=1.0)
    with pytest.raises(tf.errors.DeadlineExceededError, match=r"rank 0 \(CPU:0\) could not join"):
        all_reduce([1.0], lonely.communicators[0])


def test_two_at_the_same_time_by_one_name():
    def body(communicator, x):
        x = tf.convert_to_tensor(x)
        if communicator.rank == 1:
            x = slowly(x, 2)  # so that rank 0's first cannot end before its second begins
        return [all_reduce(x + i, communicator, name="same") for i in range(2)]

    with pytest.raises(tf.errors.InvalidArgumentError, match="'same' is already running on rank"):
        group(2).function(body)(integers(2, 5))
    assert_goes_on(group(2))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_another_op_that_fails_ends_the_step_and_not_the_group(failing):
    """Ranks that were done already must not stay one generation behind."""

    @group(3).function
    def step(communicator, x, bad):
        y = all_reduce(x, communicator, name="before")
        if communicator.rank == failing:
            check = tf.debugging.Assert(tf.logical_not(bad), ["a failure of mine"])
            with tf.control_dependencies([check]):
                y = slowly(y, 0.05)
        return all_reduce(y, communicator, name="after")

    xs = [tf.constant(x) for x in integers(3, 40)]
    for bad in (False, True, True, False, True, False):
        if bad:
            with pytest.raises(tf.errors.InvalidArgumentError, match="failure of mine"):
                step(xs, [True] * 3)
        else:
            for y in step(xs, [False] * 3):
                np.testing.assert_array_equal(y, 3 * sum(xs))


def test_disagreement_within_a_loop():
    """Disagree in one of many iterations, which may run at the same time."""

    @group(2).function
    def step(communicator, x, odd_one):
        def once(i, y):
            n = tf.where(tf.equal(i, odd_one), 3, 4)
            return i + 1, y + tf.reduce_sum(all_reduce(x[:n], communicator))

        return tf.while_loop(lambda i, _: i < 9, once, (tf.constant(0), tf.constant(0.0)))[1]

    xs = [tf.range(4.0)] * 2
    assert [float(y) for y in step(xs, [tf.constant(-1)] * 2)] == [9 * 12] * 2
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"all_reduce_\d+@5'.*do not agree"):
        step(xs, [tf.constant(5), tf.constant(-1)])
    assert_goes_on(group(2))


def test_a_schedule_of_another_name_but_the_same_steps_is_the_same():
    """Ranks compare the moves that run, not the name."""
    own = ring(2)
    xs = integers(2, 5)
    function = group(2).function(
        lambda c, x: all_reduce(x, c, schedule=own if c.rank else "ring", name="equal")
    )
    for y in function(xs):
        np.testing.assert_array_equal(y, sum(xs))
