"""Exchanges between replicas, in graphs and eagerly: three logical devices of one process."""

import time

import numpy as np
import pytest
import tensorflow as tf
from helpers import PATIENCE, group

from tfscale.compression.method import joined, separated
from tfscale.exchange.collective_schedules import Fixed
from tfscale.exchange.rows import JOIN_ALWAYS, JOIN_UP_TO, sum_all, sum_rows
from tfscale.exchange.team import Team
from tfscale.exchange.tensorflow_team import TensorFlowTeam
from tfscale.ops import Group

RANKS = 3
HEIGHT = 12  # rows of the sparse tensors

pytestmark = pytest.mark.parametrize("how", ["graph", "eager"])


@pytest.fixture(scope="module", params=["engine", "tensorflow"])
def team(request):
    if request.param == "tensorflow":
        return TensorFlowTeam(group(RANKS))
    return Team(group(RANKS), Fixed("ring", RANKS))


def on_each(team, how, body):
    """Return the results of ``body`` on each replica, as numpy arrays."""

    def run():
        return team.on_each(body)

    results = (tf.function(run) if how == "graph" else run)()
    return tf.nest.map_structure(lambda x: x.numpy(), results)


FLOATS = (tf.float32, tf.float64, tf.float16, tf.bfloat16)
INTEGERS = (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64)


def test_tensors_of_all_types_are_summed_in_their_own(team, how):
    """Sums are as exact as the type: float32 would lose the last digits of 2**31 and 2**53 + 1."""
    large = {tf.uint32: 2**31 + 1, tf.int64: 2**53 + 1, tf.float64: 1 + 2**-50}
    dtypes = (*FLOATS, *INTEGERS)

    def body(replica):
        small = [tf.constant([[1, 2], [3, replica]], dtype) for dtype in dtypes]
        single = [tf.constant(number if replica == 0 else 0, t) for t, number in large.items()]
        return sum_all(team, replica, [*small, *single], "mixed")

    for sums in on_each(team, how, body):
        for dtype, found in zip(dtypes, sums):
            assert found.dtype == dtype
            np.testing.assert_array_equal(found.astype(np.float64), [[3, 6], [9, 3]])
        for (dtype, number), found in zip(large.items(), sums[len(dtypes) :]):
            assert found == np.array(number, dtype.as_numpy_dtype)


def test_the_sum_of_bools_says_whether_any_is_true(team, how):
    def body(replica):
        return sum_all(team, replica, [tf.constant([False, True, replica == 1])], "bools")

    for (found,) in on_each(team, how, body):
        assert found.dtype == bool
        np.testing.assert_array_equal(found, [False, True, True])


def test_what_is_no_number_is_refused(team, how):
    with pytest.raises(TypeError, match="cannot exchange values of type string, only num"):
        on_each(team, how, lambda replica: sum_all(team, replica, [tf.constant("a")], "x"))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(2, 0, 3), (1, 1, 1)])
def test_rows_are_joined_along_any_axis(team, how, axis, lengths):
    shapes = [[n if i == axis else 2 + i for i in range(3)] for n in lengths]
    parts = [np.random.default_rng(r).integers(0, 99, shape) for r, shape in enumerate(shapes)]

    def body(replica):
        return team.concat(replica, tf.constant(parts[replica]), axis)

    for found in on_each(team, how, body):
        np.testing.assert_array_equal(found, np.concatenate(parts, axis))


def test_rows_of_other_types_are_joined(team, how):
    def body(replica):
        return team.concat(replica, tf.fill([replica], replica == 1), 0)

    for found in on_each(team, how, body):
        assert found.dtype == bool
        np.testing.assert_array_equal(found, [True, False, False])


def slices(rows, replica, dtype, width=2):
    """Return this number of rows, some of them more than once."""
    rng = np.random.default_rng(replica)
    indices = rng.integers(0, HEIGHT, rows).astype(dtype)
    values = rng.integers(-9, 9, (rows, width)).astype(np.float32)
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([HEIGHT, width]))


MOST = JOIN_UP_TO * 2 * HEIGHT // RANKS  # rows of the longest that are joined, if they are wide
WIDE = JOIN_ALWAYS // 4 // HEIGHT  # so that hardly any are joined for their few bytes
NARROW = 2  # numbers of a row


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("rows", "width", "joins"),
    [
        ((7, 7, 7), WIDE, True),
        ((7, 0, 2), WIDE, True),
        ((0, 0, 0), WIDE, True),
        ((MOST, 0, 0), WIDE, True),
        ((MOST + 1, 0, 0), WIDE, False),
        ((2 * MOST,) * RANKS, WIDE, False),
        ((2 * MOST,) * RANKS, NARROW, True),
        ((JOIN_ALWAYS // 4 // NARROW // RANKS + 1, 0, 0), NARROW, False),
    ],
)
def test_sparse_sums_equal_dense_ones(team, how, rows, width, joins, dtype):
    each = [slices(n, replica, dtype, width) for replica, n in enumerate(rows)]

    def body(replica):
        total = sum_rows(team, replica, each[replica], "sparse")
        return tf.convert_to_tensor(total), total.indices

    dense = sum(tf.convert_to_tensor(one).numpy() for one in each)
    for found, indices in on_each(team, how, body):
        np.testing.assert_array_equal(found, dense)
        assert indices.dtype == dtype
        assert len(indices) == (sum(rows) if joins else HEIGHT)


def test_dense_and_sparse_go_together(team, how):
    def body(replica):
        mixed = [tf.constant([1.0]), slices(2, replica, np.int32), tf.constant(2, tf.int32)]
        one, sparse, two = sum_all(team, replica, mixed, "both")
        return one, tf.convert_to_tensor(sparse), two

    dense = sum(tf.convert_to_tensor(slices(2, r, np.int32)).numpy() for r in range(RANKS))
    for one, sparse, two in on_each(team, how, body):
        assert (one, two) == (RANKS, 2 * RANKS)
        np.testing.assert_array_equal(sparse, dense)


def test_sparse_without_a_height_is_refused(team, how):
    homeless = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    with pytest.raises(ValueError, match="has no dense_shape"):
        on_each(team, how, lambda replica: sum_rows(team, replica, homeless, "x"))


def test_all_get_what_the_first_has(team, how):
    def body(replica):
        return team.broadcast(replica, tf.constant([replica == 0, False]), "first")

    for found in on_each(team, how, body):
        np.testing.assert_array_equal(found, [True, False])


def test_a_single_replica_keeps_what_it_has(how):
    alone = Team(None, Fixed("ring", 1))
    sparse = slices(2, 0, np.int32)

    def body(replica):
        x = tf.constant([1.0, 2.0])
        (total,) = sum_all(alone, replica, [x], "x")
        assert sum_rows(alone, replica, sparse, "x") is sparse
        return total, alone.concat(replica, x, 0), alone.broadcast(replica, x, "x")

    for found in on_each(alone, how, body)[0]:
        np.testing.assert_array_equal(found, [1, 2])


def test_joined_and_separated_undo_each_other(team, how):
    tensors = [tf.constant([[1.0, 2.0]]), tf.constant(3.0), tf.zeros([0, 2]), tf.constant([4.0])]
    assert joined(tensors).shape == [4]
    for found, tensor in zip(separated(joined(tensors), tensors), tensors):
        np.testing.assert_array_equal(found, tensor)


@pytest.mark.parametrize("late", [0, 0.5])
def test_the_cause_of_what_failed_on_one_replica_is_raised(how, late):
    """The cause comes at once, whether the others are in an exchange by then or enter it later."""
    if how == "graph":
        pytest.skip("a graph runs on all replicas or on none")
    own = Group.local([f"CPU:{i}" for i in range(RANKS)], deadline=PATIENCE)
    team = Team(own, Fixed("ring", RANKS))
    seen = []

    def body(replica):
        if replica == 1:
            raise LookupError("of my own")
        time.sleep(late)
        try:
            return sum_all(team, replica, [tf.ones([2])], "never")
        except tf.errors.OpError as error:
            seen.append(error)
            raise

    with pytest.raises(LookupError, match="of my own"):
        on_each(team, how, body)
    assert len(seen) == RANKS - 1
    for error in seen:  # and no deadline has passed
        assert isinstance(error, tf.errors.CancelledError)
        assert "LookupError: of my own" in error.message
    sums = on_each(team, how, lambda replica: sum_all(team, replica, [tf.ones([2])], "ok"))
    np.testing.assert_array_equal(sums, np.full([RANKS, 1, 2], RANKS))


def test_a_transfer_is_between_two_replicas_alone(team, how):
    """One after the other in a line, as activations go; the first sends more than once."""

    def body(replica):
        rank, x = team.rank(replica), tf.fill([4], 1.0 + replica)
        got = []
        for microbatch in range(3):
            name = f"microbatch {microbatch}"
            y = x
            if rank > 0:
                spec = tf.TensorSpec([4])
                y += team.transfer(replica, spec, rank - 1, rank, f"{name} to {rank}")
            if rank < RANKS - 1:
                team.transfer(replica, y, rank, rank + 1, f"{name} to {rank + 1}")
            got.append(y)
        return got

    for replica, found in enumerate(on_each(team, how, body)):
        np.testing.assert_array_equal(found, np.full([3, 4], (1, 3, 6)[replica]))


def test_rows_go_to_all_and_come_back(team, how):
    """Tokens go to experts and back so; some experts get none."""
    counts = np.array([[2, 0, 1], [0, 0, 0], [3, 0, 1]])

    def body(replica):
        rank = team.rank(replica)
        x = tf.random.stateless_normal([int(counts[rank].sum()), 2], [rank, 0])
        y, received = team.all_to_all(replica, x, "tokens", sizes=counts[rank])
        back, _ = team.all_to_all(replica, y, "answers", sizes=received, received=counts[rank])
        whole = team.all_to_all(replica, tf.range(6) + 10 * rank, "shares")
        return x, received, back, whole

    for rank, (x, received, back, whole) in enumerate(on_each(team, how, body)):
        np.testing.assert_array_equal(received, counts[:, rank])
        np.testing.assert_array_equal(back, x)
        np.testing.assert_array_equal(
            whole, [10 * s + 2 * rank + i for s in range(3) for i in (0, 1)]
        )


def test_one_replica_alone_keeps_its_rows(how):
    alone = Team(None, Fixed("ring", 1))
    x, sizes = tf.range(3), [3]
    assert alone.all_to_all(0, x, "rows") is x
    assert alone.all_to_all(0, x, "rows", sizes=sizes) == (x, sizes)
