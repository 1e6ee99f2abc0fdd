"""The log of what ran: names, times and bytes on the wire."""

import time

import numpy as np
import pytest
import tensorflow as tf
from helpers import PATIENCE, integers, slowly

from tfscale.ops import BucketId, Execution, Group, Total, all_reduce

RANKS = 4


@pytest.fixture
def fresh():
    """A group without a past."""
    return Group.local([f"CPU:{i}" for i in range(RANKS)], deadline=PATIENCE)


def test_nothing_ran_yet(fresh):
    for communicator in fresh.communicators:
        assert communicator.log() == []
        assert communicator.totals() == {}


@pytest.mark.parametrize(("wire", "bytes_each"), [("fp32", 4), ("bf16", 2), ("int8", 1 + 4 / 256)])
def test_a_ring_sends_its_part_of_the_buffer(fresh, wire, bytes_each):
    numbers = 256 * RANKS * 100  # whole blocks
    function = fresh.function(lambda c, x: all_reduce(x, c, wire=wire, name="gradients"))
    before = time.time()
    function([np.ones(numbers, np.float32)] * RANKS)
    after = time.time()
    for communicator in fresh.communicators:
        (execution,) = communicator.log()
        assert execution.bucket == BucketId("gradients")
        assert before <= execution.start <= execution.end <= after + 1e-6  # whole microseconds
        assert execution.sent == 2 * (RANKS - 1) / RANKS * numbers * bytes_each


def test_totals_add_up(fresh):
    @fresh.function
    def step(communicator, x):
        return all_reduce(x, communicator, name="a"), all_reduce(x[:64], communicator, name="b")

    for _ in range(3):
        step(integers(RANKS, 512))
    for communicator in fresh.communicators:
        log, totals = communicator.log(), communicator.totals()
        assert [type(e) for e in log] == [Execution] * 6
        assert set(totals) == {BucketId("a"), BucketId("b")}
        for bucket, total in totals.items():
            mine = [e for e in log if e.bucket == bucket]
            seconds = sum(e.end - e.start for e in mine)
            assert total == Total(3, sum(e.sent for e in mine), pytest.approx(seconds, abs=1e-5))
        assert totals[BucketId("a")].sent == 8 * totals[BucketId("b")].sent == 3 * (2 * 3 * 512)


def test_all_ranks_have_one_clock_and_nobody_ends_before_the_last_has_begun(fresh):
    def body(communicator, x):
        x = tf.convert_to_tensor(x)
        late = communicator.rank == RANKS - 1
        return all_reduce(slowly(x, 0.3) if late else x, communicator, name="slow")

    fresh.function(body)(integers(RANKS, 8))
    spans = [(e.start, e.end) for c in fresh.communicators for e in c.log()]
    assert len(spans) == RANKS
    assert max(start for start, _ in spans) <= min(end for _, end in spans) + 3e-6


def test_iterations_of_a_loop_are_one_bucket(fresh):
    @fresh.function
    def step(communicator, x):
        def once(i, y):
            return i + 1, all_reduce(y, communicator, name="inside")

        return tf.while_loop(lambda i, _: i < 5, once, (tf.constant(0), x))[1]

    step([tf.ones([3])] * RANKS)
    for communicator in fresh.communicators:
        assert {e.bucket for e in communicator.log()} == {BucketId("inside")}
        assert communicator.totals()[BucketId("inside")].calls == 5


def test_what_failed_is_in_the_log():
    pair = Group.local(["CPU:0", "CPU:1"], deadline=PATIENCE)
    function = pair.function(lambda c, x: all_reduce(x[: 3 + c.rank], c, name="odd"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="ranks do not agree"):
        function([tf.ones([5])] * 2)
    for communicator in pair.communicators:
        (execution,) = communicator.log()
        assert (execution.bucket, execution.sent) == (BucketId("odd"), 0)


def test_no_one_to_talk_to_is_nothing_to_log():
    alone = Group.local(["CPU:0"])
    all_reduce([1.0], alone.communicators[0])
    assert alone.communicators[0].log() == []
