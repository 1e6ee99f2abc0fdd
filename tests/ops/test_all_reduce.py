"""All-reduce in one process: right sums, equal bits, and nothing lost."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    ALGORITHMS,
    ERROR,
    LOSSY,
    WIRES,
    assert_conserved,
    assert_same_bits,
    group,
    integers,
    normal,
    numpy,
    run,
)

from tests.covering import grid
from tfscale.collectives import Schedule, ScheduleError, add, finalise, keep, ring, send
from tfscale.ops import all_gather, all_reduce, reduce_scatter

SIZES = (0, 1, 5, 255, 1000, 20011)
PIECES = 1024  # bytes: so that 20011 numbers travel in many parts


@grid("algorithm, ranks, size", ALGORITHMS, (1, 2, 3, 4, 5, 8), SIZES)
def test_fp32_sums_and_averages_exactly(algorithm, ranks, size):
    xs = integers(ranks, size)

    def body(communicator, x):
        settings = {"schedule": algorithm, "piece_bytes": PIECES}
        total = all_reduce(x, communicator, **settings)
        mean = all_reduce(x, communicator, reduction="mean", **settings)
        whole = all_reduce(x, communicator, schedule=algorithm)  # in one part
        return total, mean, whole

    for total, mean, whole in run(body, xs):
        np.testing.assert_array_equal(total, sum(xs))
        np.testing.assert_array_equal(mean, sum(xs) / np.float32(ranks))
        np.testing.assert_array_equal(whole, sum(xs))


@grid("algorithm, ranks, wire, size", ALGORITHMS, (2, 3, 4, 8), WIRES, (1, 255, 20011))
def test_every_wire_gives_all_ranks_the_same_bits_close_to_the_sum(algorithm, ranks, wire, size):
    xs = normal(ranks, size)
    settings = {"schedule": algorithm, "wire": wire, "piece_bytes": PIECES}
    results = run(lambda c, x: all_reduce(x, c, **settings), xs)
    assert_same_bits(results)
    exact = sum(x.astype(np.float64) for x in xs)
    # Each rank encodes once, at most the sum of the largest numbers.
    limit = (ERROR[wire] * ranks + 1e-6) * sum(np.max(np.abs(x)) for x in xs)
    np.testing.assert_allclose(results[0], exact, rtol=0, atol=limit)


@grid("algorithm, ranks, wire, reduction", ALGORITHMS, (2, 3, 8), LOSSY, ("sum", "mean"))
def test_nothing_is_lost_over_many_steps(algorithm, ranks, wire, reduction):
    steps, n = 20, 3000
    settings = {"schedule": algorithm, "wire": wire, "reduction": reduction}

    @group(ranks).function
    def step(communicator, x, residual):
        return all_reduce(
            x, communicator, residual=residual, seed=3, piece_bytes=PIECES, **settings
        )

    old = [np.zeros(n, np.float32)] * ranks
    for number in range(steps):
        xs = normal(ranks, n, seed=number)
        outputs, new = zip(*numpy(step(xs, old)), strict=True)
        assert_same_bits(outputs)
        divisor = ranks if reduction == "mean" else 1
        assert_conserved(xs, old, outputs, new, divisor, case=number)
        if number == 0:
            assert any(np.any(kept) for kept in new), "nothing was lost: is the wire used?"
        old = new


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_error_feedback_keeps_a_running_mean_close(algorithm):
    """Residuals make the mean of 40 outputs err less than one output."""
    xs = normal(3, 500)

    @group(3).function
    def step(communicator, x, residual):
        return all_reduce(x, communicator, schedule=algorithm, wire="int4", residual=residual)

    residuals, outputs = [np.zeros(500, np.float32)] * 3, []
    for _ in range(40):
        results = numpy(step(xs, residuals))
        residuals = [kept for _, kept in results]
        outputs.append(results[0][0])
    one, many = (np.abs(y - sum(xs)).max() for y in (outputs[0], np.mean(outputs, axis=0)))
    assert many < one / 8


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_lossless_wire_sends_the_residual_and_leaves_none(dtype):
    xs, old = [x.astype(dtype) for x in integers(3, 40)], integers(3, 40, seed=1)
    for y, kept in run(lambda c, x, e: all_reduce(x, c, residual=e), xs, old):
        np.testing.assert_array_equal(y, sum(xs) + sum(old))
        assert not kept.any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_and_leaves_residuals_alone(algorithm, bad):
    xs, old, wires = normal(3, 600), normal(3, 600, seed=1), [*LOSSY, "fp32"]
    xs[1][[0, 333, 599]] = bad

    def body(communicator, x, residual):
        settings = {"schedule": algorithm, "residual": residual, "piece_bytes": PIECES}
        return [all_reduce(x, communicator, wire=wire, **settings) for wire in wires]

    results = run(body, xs, old)
    for w, wire in enumerate(wires):
        assert_same_bits([result[w][0] for result in results])
        assert not np.isfinite(results[0][w][0][[0, 333, 599]]).any(), wire
        for result, before in zip(results, old, strict=True):
            np.testing.assert_array_equal(result[w][1], before, err_msg=wire)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_fp32_passes_what_is_not_finite_on_as_it_is(bad):
    xs = integers(3, 600)
    expected = sum(xs)
    xs[2][7] = expected[7] = bad
    for y in run(lambda c, x: all_reduce(x, c), xs):
        np.testing.assert_array_equal(y, expected)


class TestTypes:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_every_type_sums_exactly_over_fp32(self, algorithm):
        dtypes = ("float32", "float16", ml_dtypes.bfloat16, "float64", "int32", "int64")
        xs = integers(3, 700)
        named = [tf.as_dtype(np.dtype(d)) for d in dtypes]

        def body(communicator, x):
            return [all_reduce(tf.cast(x, d), communicator, schedule=algorithm) for d in named]

        for result in run(body, xs):
            for dtype, y in zip(dtypes, result, strict=True):
                assert y.dtype == np.dtype(dtype)
                np.testing.assert_array_equal(y.astype(np.float64), sum(xs))

    def test_float64_and_int64_keep_all_their_bits(self):
        small, large = 2.0**-50, 2**60
        doubles = [np.array([1.0]), np.array([small])]
        longs = [np.array([large]), np.array([1])]
        for y, z in run(lambda c, x, i: (all_reduce(x, c), all_reduce(i, c)), doubles, longs):
            assert y == 1 + small
            assert z == large + 1

    def test_integers_wrap_around(self):
        top = np.array([2**31 - 1], np.int32)
        for y in run(lambda c, x: all_reduce(x, c), [top, np.array([1], np.int32)]):
            assert y == -(2**31)

    def test_a_mean_in_float64_is_divided_in_float64(self):
        xs = [np.array([1.0]), np.array([0.0]), np.array([0.0])]
        for y in run(lambda c, x: all_reduce(x, c, reduction="mean"), xs):
            assert y == 1 / 3

    def test_halves_are_summed_as_float32(self):
        """Sums in float16 would give 2048 + 1 + 1 = 2048."""
        xs = [np.array([v], np.float16) for v in (2048, 1, 1)]
        for y in run(lambda c, x: all_reduce(x, c, schedule="central"), xs):
            assert y == 2050

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
    def test_low_precision_wires_carry_every_float(self, dtype):
        xs = normal(3, 400)

        def body(communicator, x):
            return [all_reduce(tf.cast(x, dtype), communicator, wire=wire) for wire in LOSSY]

        results = run(body, xs)
        for w, wire in enumerate(LOSSY):
            assert_same_bits([result[w] for result in results])
            limit = 2 * 3 * (ERROR[wire] + 2**-8) * sum(np.abs(x).max() for x in xs)
            wrong = np.abs(results[0][w].astype(np.float64) - sum(xs))
            assert wrong.max() < limit, wire


class TestStochasticRounding:
    def test_it_depends_on_the_seed_and_on_nothing_else(self):
        xs = normal(2, 500)

        def body(communicator, x):
            settings = {"wire": "int4", "stochastic": True}
            return [all_reduce(x, communicator, seed=seed, **settings) for seed in (1, 1, 2)]

        one, again, other = run(body, xs)[0]
        np.testing.assert_array_equal(one, again)
        assert (one != other).any()

    def test_ranks_draw_differently(self):
        """Equal draws would double an error instead of averaging it."""
        xs = [np.full(2000, 0.4, np.float32)] * 3
        xs[0][::256] = 1  # the blocks' scales
        old = [np.zeros(2000, np.float32)] * 3
        results = run(
            lambda c, x, e: all_reduce(
                x, c, wire="ternary", schedule="central", residual=e, stochastic=True
            ),
            xs,
            old,
        )
        (_, one), (_, other) = results[1:]
        assert (one != other).mean() > 0.2

    def test_residuals_of_ternary_stay_small(self):
        """Ternary rounds to nearest with a residual; at random, residuals would grow forever."""
        xs = normal(2, 1000)

        @group(2).function
        def step(communicator, x, lost):
            return all_reduce(x, communicator, wire="ternary", residual=lost)

        lost = [np.zeros(1000, np.float32)] * 2
        for _ in range(100):
            _, lost = zip(*step(xs, lost), strict=True)
        assert max(np.abs(each).max() for each in numpy(lost)) < 10 * np.abs(xs).max()

    def test_it_is_right_on_average(self):
        xs = [np.full(256, 0.3, np.float32), np.full(256, 0.0, np.float32)]
        xs[0][0] = 1

        @group(2).function
        def step(communicator, x, seed):
            return all_reduce(x, communicator, wire="int4", stochastic=True, seed=seed)

        mean = np.mean([numpy(step(xs, [s, s]))[0] for s in tf.range(200)], axis=0)
        assert abs(mean[1:].mean() - 0.3) < 0.003


def to_rank_zero(ranks):
    """A user's own schedule: all send to rank 0, which sends the sum to all."""

    def program(rank):
        others = [r for r in range(ranks) if r != rank]
        if rank == 0:
            return [*(add(r, 0) for r in others), finalise(0), *(send(r, 0) for r in others)]
        return [send(0, 0), keep(0, 0)]

    return Schedule("mine", ranks, 1, program)


@pytest.mark.parametrize("schedule", [to_rank_zero, to_rank_zero(3), lambda ranks: ring(ranks)])
def test_users_bring_their_own_schedules(schedule):
    xs = integers(3, 900)
    for y in run(lambda c, x: all_reduce(x, c, schedule=schedule), xs):
        np.testing.assert_array_equal(y, sum(xs))


def test_a_large_buffer_in_pieces_of_the_engines_choice():
    xs = integers(4, 3_000_001)
    for y in run(lambda c, x: all_reduce(x, c), xs):
        np.testing.assert_array_equal(y, sum(xs))


@pytest.mark.parametrize("shape", [(), (0, 7), (3, 0), (2, 3, 4, 5)])
def test_any_shape_will_do(shape):
    xs = integers(3, *shape)
    for y in run(lambda c, x: all_reduce(x, c), xs):
        np.testing.assert_array_equal(y, sum(xs))


def test_inputs_are_not_written_to():
    xs = [tf.constant(x) for x in normal(2, 5000)]
    before = numpy(xs)
    run(lambda c, x: [all_reduce(x, c), all_reduce(x, c, wire="int8")], xs)
    np.testing.assert_array_equal(numpy(xs), before)


class TestOneRank:
    @staticmethod
    def address(tensor):
        return np.frombuffer(memoryview(tensor), np.float32).ctypes.data

    @pytest.mark.parametrize("wire", WIRES)
    def test_it_costs_nothing_not_even_a_copy(self, wire):
        (communicator,) = group(1).communicators
        x, residual = tf.random.normal([1000]), tf.random.normal([1000])
        y, kept = all_reduce(x, communicator, wire=wire, residual=residual, reduction="mean")
        assert self.address(y) == self.address(x)
        assert self.address(kept) == self.address(residual)


def two_pairs(ranks):
    """Each pair of ranks sums by itself: nobody has the sum of all."""

    def build(rank):
        partner = rank ^ 1
        if rank % 2:
            return [send(partner, 0), keep(partner, 0)]
        return [add(partner, 0), finalise(0), send(partner, 0)]

    return Schedule("two pairs", ranks, 1, build)


@pytest.mark.parametrize("op", [all_reduce, reduce_scatter, all_gather])
@pytest.mark.parametrize(
    "schedule",
    [two_pairs, lambda ranks: Schedule("nothing", ranks, 1, lambda rank: [finalise(0)])],
    ids=["two pairs", "nothing"],
)
def test_a_schedule_that_would_give_wrong_sums_is_refused(op, schedule):
    with pytest.raises(ScheduleError, match="for 4 ranks would not give the right all-reduce"):
        op(tf.ones([8]), group(4).communicators[0], schedule=schedule)
