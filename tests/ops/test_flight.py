"""All-reduces that go on behind steps: the same sums, errors where they are taken, no leak."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import PATIENCE, group, integers, names, normal, numpy

from tfscale.ops import Flight, Group, all_reduce

RANKS, SIZE = 3, 3000


def flights(ranks):
    """Two functions of a group, of which one begins and the other takes."""
    each = [Flight(communicator) for communicator in ranks.communicators]

    def begun(size=SIZE, **how):
        return ranks.function(
            lambda c, x, *lost: each[c.rank].begin(
                x, residual=lost[0] if lost else None, name="flight", **how
            )
        )

    def taken(size=SIZE, residual=False):
        def take(communicator):
            found = each[communicator.rank].take([size], residual)
            return tuple(part for part in found if part is not None)

        return ranks.function(take)

    return begun, taken


@pytest.mark.parametrize("wire", ["fp32", "int8", "ternary"])
def test_the_sum_and_what_is_lost_are_those_of_all_reduce(wire):
    begun, taken = flights(group(RANKS))
    begin, take = begun(wire=wire), taken(residual=True)
    at_once = group(RANKS).function(lambda c, x, lost: all_reduce(x, c, wire=wire, residual=lost))
    lost = [np.zeros(SIZE, np.float32)] * RANKS
    for step in range(3):
        xs = normal(RANKS, SIZE, seed=step)
        begin(xs, lost)
        expected = numpy(at_once(xs, lost))  # while the others travel
        found = numpy(take())
        for (total, rest, waited, took), (y, left) in zip(found, expected, strict=True):
            assert total.tobytes() == y.tobytes() and rest.tobytes() == left.tobytes()
            assert waited >= 0 and took > 0
        lost = [left for _, left in expected]
    assert wire == "fp32" or np.any(lost[0])


def test_what_nobody_takes_gives_way_to_the_next():
    begun, taken = flights(group(RANKS))
    begin, take = begun(), taken()
    xs = integers(RANKS, SIZE)
    begin(xs)
    begin([2 * x for x in xs])
    for total, *_ in numpy(take()):
        np.testing.assert_array_equal(total, 2 * sum(xs))
    with pytest.raises(tf.errors.FailedPreconditionError, match="no exchange was begun"):
        take()


def test_a_sum_of_another_size_is_refused():
    begun, taken = flights(group(RANKS))
    begun()(integers(RANKS, SIZE))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3000\], and what is to be taken"):
        taken(size=5)()


def test_an_error_is_raised_where_the_sum_is_taken_and_life_goes_on():
    """One rank does not begin, and later gives up."""
    own = Group.local(["CPU:0", "CPU:1"], deadline=PATIENCE)
    each = [Flight(communicator) for communicator in own.communicators]

    @own.function
    def begin_one(communicator, x):
        if communicator.rank == 0:
            each[0].begin(x, name="lonely")
        return x

    @own.function
    def take_one(communicator, x):
        return each[0].take([SIZE]).total if communicator.rank == 0 else x

    own.join()
    begin_one(integers(2, SIZE))
    own.communicators[1].give_up("out of data")
    with pytest.raises(tf.errors.CancelledError, match="gave up: out of data") as error:
        take_one(integers(2, SIZE))
    assert names(str(error.value)) == {1}
    begun, taken = flights(own)
    xs = integers(2, SIZE)
    begun()(xs)
    for total, *_ in numpy(taken()()):
        np.testing.assert_array_equal(total, sum(xs))


def test_a_step_that_fails_does_not_wait_for_what_it_takes():
    own = Group.local(["CPU:0", "CPU:1"], deadline=PATIENCE)
    flight = Flight(own.communicators[0])

    @tf.function(autograph=False)
    def begin(x):
        flight.begin(x, name="never ends")

    @tf.function(autograph=False)
    def failing(x):
        total = flight.take([SIZE]).total
        tf.debugging.assert_less(x, 0.0, "own mistake")
        return total

    own.join()
    with tf.device("CPU:0"):
        begin(tf.ones([SIZE]))
        with pytest.raises(tf.errors.InvalidArgumentError, match="own mistake"):
            failing(tf.ones([SIZE]))


@pytest.mark.slow
def test_thousands_leave_nothing_behind():
    begun, taken = flights(group(2))
    begin, take = begun(wire="int8"), taken(size=50_000, residual=True)
    xs = lost = [np.ones(50_000, np.float32)] * 2

    def many(times):
        for _ in range(times):
            begin(xs, lost)
            take()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = many(300)
    grown = many(2000) - before  # four vectors of 200 kB each time: a leak would be 1.6 GB
    assert grown < 100e6, f"{grown / 1e6:.0f} MB more"


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_flight_holds_several_sums_which_come_out_in_order(wire):
    own, depth = group(RANKS), 4
    each = [Flight(communicator, depth) for communicator in own.communicators]
    begin = own.function(lambda c, x: each[c.rank].begin(x, wire=wire, name="queued"))
    take = own.function(lambda c: each[c.rank].take([SIZE]).total)
    counts = own.function(lambda c: each[c.rank].counts())
    at_once = group(RANKS).function(lambda c, x: all_reduce(x, c, wire=wire))
    steps = [normal(RANKS, SIZE, seed=step) for step in range(depth)]
    for xs in steps:
        begin(xs)
    assert all(held == depth and there <= depth for held, there in numpy(counts()))
    for left, xs in enumerate(steps, 1 - depth):
        for found, expected in zip(numpy(take()), numpy(at_once(xs)), strict=True):
            assert found.tobytes() == expected.tobytes()
        assert all(held == -left for held, _ in numpy(counts()))


def test_a_full_flight_drops_its_oldest_sum():
    own = group(RANKS)
    each = [Flight(communicator, 2) for communicator in own.communicators]
    begin = own.function(lambda c, x: each[c.rank].begin(x, name="queued"))
    take = own.function(lambda c: each[c.rank].take([SIZE]).total)
    xs = integers(RANKS, SIZE)
    for times in (1, 2, 3):
        begin([times * x for x in xs])
    for times in (2, 3):
        for total in numpy(take()):
            np.testing.assert_array_equal(total, times * sum(xs))
    with pytest.raises(tf.errors.FailedPreconditionError, match="no exchange was begun"):
        take()


def test_a_step_that_fails_does_not_wait_for_the_sums_before_the_one_that_it_takes():
    own = Group.local(["CPU:0", "CPU:1"], deadline=PATIENCE)
    flight = Flight(own.communicators[0], 3)

    @tf.function(autograph=False)
    def begin(x):
        flight.begin(x, name="never ends")

    @tf.function(autograph=False)
    def failing(x):
        total = [flight.take([SIZE]).total for _ in range(2)]
        tf.debugging.assert_less(x, 0.0, "own mistake")
        return total

    own.join()
    with tf.device("CPU:0"):
        for _ in range(3):
            begin(tf.ones([SIZE]))
        with pytest.raises(tf.errors.InvalidArgumentError, match="own mistake"):
            failing(tf.ones([SIZE]))
