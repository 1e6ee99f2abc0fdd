"""The other collectives, gradients, and what is refused before anything runs."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    ERROR,
    LOSSY,
    WIRES,
    assert_same_bits,
    group,
    halving_by_reduce_scatter,
    integers,
    normal,
    run,
)

from tfscale.collectives import matrix, mixture, mixtures, ring, wires
from tfscale.ops import DTYPES, Group, all_gather, all_reduce, broadcast, mix, reduce_scatter

SHARDED = [(algorithm, p) for p in (1, 2, 3, 4, 5, 8) for algorithm in halving_by_reduce_scatter(p)]
ROWS = (0, 1, 7, 600)
PIECES = 1024


def rows_of(array, rank, ranks):
    n = len(array) // ranks
    return array[rank * n : (rank + 1) * n]


@pytest.mark.parametrize(("algorithm", "ranks"), SHARDED)
class TestHalves:
    def test_reduce_scatter_leaves_each_rank_its_rows(self, algorithm, ranks):
        xs = integers(ranks, max(ROWS) * ranks, 3)

        def body(communicator, x):
            return [
                [
                    reduce_scatter(
                        x[: n * ranks],
                        communicator,
                        schedule=algorithm,
                        reduction=reduction,
                        piece_bytes=PIECES,
                    )
                    for n in ROWS
                ]
                for reduction in ("sum", "mean")
            ]

        for rank, (sums, means) in enumerate(run(body, xs)):
            for n, y, mean in zip(ROWS, sums, means, strict=True):
                mine = rows_of(sum(xs)[: n * ranks], rank, ranks)
                np.testing.assert_array_equal(y, mine)
                np.testing.assert_array_equal(mean, mine / np.float32(ranks))

    def test_all_gather_joins_rows_in_rank_order(self, algorithm, ranks):
        xs = integers(ranks, max(ROWS), 3)

        def body(communicator, x):
            settings = {"schedule": algorithm, "piece_bytes": PIECES}
            return [all_gather(x[:n], communicator, **settings) for n in ROWS]

        for result in run(body, xs):
            for n, y in zip(ROWS, result, strict=True):
                np.testing.assert_array_equal(y, np.concatenate([x[:n] for x in xs]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
class TestHalvesOverLowPrecision:
    def test_reduce_scatter_loses_nothing(self, algorithm, ranks):
        """A rank's own rows are not rounded; what others lost on their way is kept by them."""
        n = 700 * ranks
        residuals = [[np.zeros(n, np.float32)] * len(LOSSY) for _ in range(ranks)]

        def body(communicator, x, residual):
            settings = {"schedule": algorithm, "piece_bytes": PIECES}
            return [
                reduce_scatter(x, communicator, wire=wire, residual=old, **settings)
                for wire, old in zip(LOSSY, residual, strict=True)
            ]

        function = group(ranks).function(body)
        for step in range(3):
            xs = normal(ranks, n, seed=step)
            results = function(xs, residuals)
            for w, wire in enumerate(LOSSY):
                before = sum(x + e[w] for x, e in zip(xs, residuals, strict=True))
                y = np.concatenate([result[w][0] for result in results])
                after = y + sum(result[w][1].numpy() for result in results)
                np.testing.assert_allclose(after, before, atol=1e-4, err_msg=wire)
            residuals = [[kept.numpy() for _, kept in result] for result in results]

    def test_all_gather_gives_all_ranks_the_same_bits(self, algorithm, ranks):
        xs = normal(ranks, 700)

        def body(communicator, x):
            return [all_gather(x, communicator, schedule=algorithm, wire=w) for w in WIRES]

        results = run(body, xs)
        for w, wire in enumerate(WIRES):
            assert_same_bits([result[w] for result in results])
            limit = ERROR[wire] * 5 + 1e-6
            np.testing.assert_allclose(results[0][w], np.concatenate(xs), rtol=0, atol=limit)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_broadcast_gives_the_roots_numbers_from_any_root(ranks):
    xs = normal(ranks, 5000)
    roots = range(ranks)

    def body(communicator, x):
        exact = [
            [broadcast(x[:n], communicator, root=root, piece_bytes=PIECES) for n in (0, 1, 5000)]
            for root in roots
        ]
        return exact, [broadcast(x, communicator, root=ranks - 1, wire=wire) for wire in LOSSY]

    results = run(body, xs)
    for exact, _ in results:
        for root in roots:
            for y in exact[root]:
                np.testing.assert_array_equal(y, xs[root][: len(y)])
    for w in range(len(LOSSY)):
        assert_same_bits([lossy[w] for _, lossy in results])


def test_the_others_take_every_type():
    xs = integers(2, 6)

    def body(communicator, x):
        return [
            [op(tf.cast(x, dtype), communicator) for op in (reduce_scatter, all_gather, broadcast)]
            for dtype in DTYPES
        ]

    for rank, result in enumerate(run(body, xs)):
        for dtype, (scattered, gathered, given) in zip(DTYPES, result, strict=True):
            assert {scattered.dtype, gathered.dtype, given.dtype} == {
                np.dtype(dtype.as_numpy_dtype)
            }
            np.testing.assert_array_equal(scattered.astype("f4"), rows_of(sum(xs), rank, 2))
            np.testing.assert_array_equal(gathered.astype("f4"), np.concatenate(xs))
            np.testing.assert_array_equal(given.astype("f4"), xs[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
class TestGradients:
    """Rank r's loss is sum(weights_r * op(x)); its gradients are known by hand."""

    def gradients(self, op, xs, weights):
        def body(communicator, x, w):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(w * op(x, communicator))
            return tape.gradient(loss, x)

        return run(body, [tf.constant(x) for x in xs], [tf.constant(w) for w in weights])

    @pytest.mark.parametrize("algorithm", ["ring", "halving", "tree"])
    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_all_reduce(self, ranks, algorithm, reduction):
        xs, weights = integers(ranks, 12), integers(ranks, 12, seed=1)
        expected = sum(weights) / np.float32(ranks if reduction == "mean" else 1)
        settings = {"schedule": algorithm, "reduction": reduction}
        for dx in self.gradients(lambda x, c: all_reduce(x, c, **settings), xs, weights):
            np.testing.assert_array_equal(dx, expected)

    @pytest.mark.parametrize("algorithm", ["ring", "direct"])
    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_reduce_scatter(self, ranks, algorithm, reduction):
        xs, weights = integers(ranks, 5 * ranks, 2), integers(ranks, 5, 2, seed=1)
        expected = np.concatenate(weights) / np.float32(ranks if reduction == "mean" else 1)
        settings = {"schedule": algorithm, "reduction": reduction}
        for dx in self.gradients(lambda x, c: reduce_scatter(x, c, **settings), xs, weights):
            np.testing.assert_allclose(dx, expected, rtol=1e-6)

    @pytest.mark.parametrize("algorithm", ["ring", "direct"])
    def test_all_gather(self, ranks, algorithm):
        xs, weights = integers(ranks, 5, 2), integers(ranks, 5 * ranks, 2, seed=1)
        results = self.gradients(lambda x, c: all_gather(x, c, schedule=algorithm), xs, weights)
        for rank, dx in enumerate(results):
            np.testing.assert_array_equal(dx, rows_of(sum(weights), rank, ranks))

    def test_broadcast(self, ranks):
        root = ranks - 1
        xs, weights = integers(ranks, 9), integers(ranks, 9, seed=1)
        results = self.gradients(lambda x, c: broadcast(x, c, root=root), xs, weights)
        for rank, dx in enumerate(results):
            np.testing.assert_array_equal(dx, sum(weights) if rank == root else np.zeros(9))


class TestMoreGradients:
    def test_two_losses_may_share_a_collective(self):
        xs = integers(2, 4)

        def body(communicator, x):
            x = tf.convert_to_tensor(x)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = all_reduce(x, communicator)
                once, twice = tf.reduce_sum(y), tf.reduce_sum(2 * y)
            # Waits on one rank only: the two gradients are under way at the same time.
            return tape.gradient(once, x), tape.gradient(twice, x)

        for once, twice in run(body, xs, times=10):
            np.testing.assert_array_equal(once, np.full(4, 2))
            np.testing.assert_array_equal(twice, np.full(4, 4))

    def test_second_derivatives(self):
        """Both ranks lose y^3: dx = 6 y^2. Then both lose dx: 12 y^2 in all, so 24 y."""
        xs = [np.float32([1, 2]), np.float32([3, 4])]

        def body(communicator, x):
            x = tf.convert_to_tensor(x)
            y = all_reduce(x, communicator)
            (dx,) = tf.gradients(tf.reduce_sum(y**3), x)
            (ddx,) = tf.gradients(tf.reduce_sum(dx), x)
            return dx, ddx

        total = sum(xs)
        for dx, ddx in run(body, xs):
            np.testing.assert_allclose(dx, 6 * total**2)
            np.testing.assert_allclose(ddx, 24 * total)

    def test_it_travels_over_the_same_wire(self):
        def body(communicator, x):
            x = tf.convert_to_tensor(x)
            (dx,) = tf.gradients(all_reduce(x, communicator, wire="int4"), x, x)
            return dx

        xs = normal(2, 300)
        results = run(body, xs)
        assert_same_bits(results)
        assert (results[0] != sum(xs)).any()

    def test_the_output_has_one_beside_a_residual(self):
        def body(communicator, x, residual):
            x = tf.convert_to_tensor(x)
            y, _ = all_reduce(x, communicator, residual=residual)
            return tf.gradients(y, x)[0]

        for dx in run(body, integers(2, 3), integers(2, 3)):
            np.testing.assert_array_equal(dx, [2, 2, 2])


class TestArguments:
    @pytest.fixture
    def communicator(self):
        return group(2).communicators[0]

    @pytest.mark.parametrize("op", [all_reduce, reduce_scatter, all_gather, broadcast])
    def test_types_that_nobody_sums(self, communicator, op):
        for x in (["a"], [True], tf.zeros([2], tf.uint8), tf.zeros([2], tf.complex64)):
            with pytest.raises(ValueError, match=r"x is a tensor of float32.*got .*Cast "):
                op(x, communicator)

    def test_an_unknown_wire(self, communicator):
        with pytest.raises(ValueError, match="wire is 'fp32', 'bf16', .*; got 'int7'"):
            all_reduce([1.0], communicator, wire="int7")

    def test_an_unknown_algorithm(self, communicator):
        with pytest.raises(ValueError, match=r"schedule is 'ring', .* got 'rings'.*mean 'ring'"):
            all_reduce([1.0], communicator, schedule="rings")

    def test_a_schedule_for_other_ranks(self, communicator):
        with pytest.raises(ValueError, match="is for 3 ranks, but 2 take part"):
            all_reduce([1.0], communicator, schedule=lambda _: _ring(3))

    def test_a_schedule_that_cannot_be_halved(self, communicator):
        with pytest.raises(ValueError, match="tree"):
            reduce_scatter([1.0, 2.0], communicator, schedule="tree")

    def test_a_root_that_is_not_there(self, communicator):
        with pytest.raises(ValueError, match="2"):
            broadcast([1.0], communicator, root=2)

    def test_an_unknown_device(self):
        with pytest.raises(
            ValueError,
            match="no device is called 'CPU:99'; this process has CPU:0",
        ):
            Group.local(["CPU:99"])

    @pytest.mark.parametrize("name", ["CPU:1", "/device:CPU:1", "full"])
    def test_devices_have_short_and_long_names(self, name):
        full = "/job:localhost/replica:0/task:0/device:CPU:1"
        assert Group.local([full if name == "full" else name]).communicators[0].device == full

    def test_a_deadline_of_no_time(self):
        with pytest.raises(ValueError, match="deadline is .* more than 0; got 0"):
            Group.local(["CPU:0"], deadline=0)

    def test_a_warning_before_the_wait(self):
        with pytest.raises(ValueError, match="0 for no warnings.*; got -1"):
            Group.local(["CPU:0"], slow_after=-1)

    # What follows is known when the op is made or run, not when it is called.
    @pytest.mark.parametrize(
        ("x", "settings", "message"),
        [
            ([1, 2], {"wire": "int8"}, "wire 'int8' carries floats only, got int32; use.*'fp32'"),
            ([1, 2], {"reduction": "mean"}, "a mean of int32 is not defined"),
            ([1, 2], {"residual": [0.0, 0.0]}, "a residual of int32 is not defined"),
            ([1.0, 2.0], {"residual": [0.0]}, "residual is a float32 tensor of x's shape, .2,"),
            ([1.0, 2.0], {"reduction": "max"}, "max"),
        ],
    )
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_what_makes_no_sense(self, ranks, x, settings, message):
        function = group(ranks).function(lambda c, x: all_reduce(x, c, **settings))
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
            function([tf.constant(x)] * ranks)

    @pytest.mark.parametrize("known", [True, False])
    def test_rows_that_cannot_be_shared(self, known):
        signature = [tf.TensorSpec([7 if known else None, 2])] * 2

        @tf.function(input_signature=signature, autograph=False)
        def function(*xs):
            pairs = zip(group(2).communicators, xs, strict=True)
            return [reduce_scatter(x, c) for c, x in pairs]

        message = "evenly" if not known else "7"
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
            function(*[tf.zeros([7, 2])] * 2)

    def test_scalars_have_no_rows(self):
        for op in (reduce_scatter, all_gather):
            with pytest.raises(
                (tf.errors.InvalidArgumentError, ValueError), match="at least one dimension"
            ):
                run(lambda c, x, op=op: op(x, c), [1.0, 2.0])

    def test_a_communicator_of_another_rank(self):
        first, second = group(2).communicators
        second.handle, handle = first.handle, second.handle
        try:
            with pytest.raises(tf.errors.InvalidArgumentError, match="program of rank 1 of 2"):
                all_reduce([1.0], second)
        finally:
            second.handle = handle


def _ring(ranks):
    from tfscale.collectives import ring

    return ring(ranks)


def shares(schedule):
    return np.array(matrix(schedule), dtype=float)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("topology", ["ring", "exponential", "random", "star"])
def test_a_mixture_is_the_product_with_its_matrix(topology, ranks):
    """Mix many parts, few numbers and none; each rank has its own result."""

    def star(p):
        out = [(0, r) for r in range(1, p)]
        return [out, [(b, a) for a, b in out]]

    schedule = mixtures(star if topology == "star" else topology, ranks)[-1]
    xs = integers(ranks, max(ROWS), 3)

    def body(communicator, x):
        return [mix(x[:n], communicator, schedule=schedule, piece_bytes=PIECES) for n in ROWS]

    expected = np.tensordot(shares(schedule), np.stack(xs), 1)
    for rank, found in enumerate(run(body, xs)):
        for n, y in zip(ROWS, found, strict=True):
            np.testing.assert_allclose(y, expected[rank][:n], rtol=1e-6, atol=1e-6)


def test_a_mixture_leaves_its_input_as_it_is():
    """Peers read it, while the output is written: so they share no memory."""
    schedule = mixtures("ring", 5)[0]

    def body(communicator, x):
        for _ in range(20):  # the input of all but the first is used by nobody else
            x = mix(x, communicator, schedule=schedule)
        return x

    xs = normal(5, 200_000)
    expected = np.tensordot(np.linalg.matrix_power(shares(schedule), 20), np.stack(xs), 1)
    for rank, y in enumerate(run(body, xs)):
        np.testing.assert_allclose(y, expected[rank], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("topology", ["ring", "exponential"])
@pytest.mark.parametrize("wire", [wire for wire in wires.FORMATS if wire != "fp32"])
def test_a_mixture_that_is_rounded_loses_nothing(wire, topology):
    """The sender keeps what rounding takes from receivers; ranks that agree stay as they are."""
    schedule = mixtures(topology, 5)[-1]

    def body(communicator, x):
        return [mix(x[:n], communicator, schedule=schedule, wire=wire, seed=3) for n in ROWS]

    xs = normal(5, max(ROWS))
    every = run(body, xs)
    for place, n in enumerate(ROWS):
        total = np.sum([found[place] for found in every], 0)
        np.testing.assert_allclose(total, np.sum(xs, 0)[:n], rtol=1e-5, atol=1e-5)
    assert any(np.abs(f[-1] - x[: ROWS[-1]]).max() > 0.1 for f, x in zip(every, xs))  # it mixes
    if wires.FORMATS[wire].rounds_at_random(with_residual=False):
        return  # each rank otherwise
    for found in run(body, [xs[0]] * 5):
        np.testing.assert_allclose(found[-1], xs[0][: ROWS[-1]], rtol=1e-6, atol=1e-6)


def test_what_a_mixture_rounds():
    schedule = mixtures("exponential", 3)[0]

    def body(communicator, x):
        return mix(x, communicator, schedule=schedule, wire="bf16")

    xs = normal(3, 1000)
    halves = [x / 2 for x in xs]
    rounded = [tf.cast(tf.cast(x, tf.bfloat16), tf.float32).numpy() for x in halves]
    for rank, found in enumerate(run(body, xs)):
        kept = halves[rank] + (halves[rank] - rounded[rank])
        np.testing.assert_allclose(found, kept + rounded[rank - 1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_a_mixture_of_other_floats(dtype):
    schedule = mixtures("exponential", 2)[0]

    def body(communicator, x):
        return mix(tf.cast(x, dtype), communicator, schedule=schedule)

    first, second = run(body, [np.float32([1.0, 2.0]), np.float32([3.0, 5.0])])
    assert first.dtype == second.dtype == dtype.as_numpy_dtype
    np.testing.assert_array_equal(np.float64(first), [2.0, 3.5])
    np.testing.assert_array_equal(np.float64(second), [2.0, 3.5])


def test_the_gradient_of_a_mixture_goes_back_the_way_it_came():
    schedule = mixture("one way", 3, [(0, 1), (0, 2), (1, 2)])
    weights = [np.float32(1.0), np.float32(10.0), np.float32(100.0)]

    def body(communicator, x, weight):
        return tf.gradients(weight * mix(x, communicator, schedule=schedule), x)[0]

    found = run(body, [np.float32([1.0])] * 3, weights)
    np.testing.assert_allclose(np.ravel(found), shares(schedule).T @ weights, rtol=1e-6)


def test_what_is_no_mixture_is_refused():
    communicator = group(2).communicators[0]
    with pytest.raises(ValueError, match="is a mixture of tfscale.collectives; got Schedule"):
        mix(tf.zeros([2]), communicator, schedule=ring(2))
    with pytest.raises(ValueError, match="Shares of int32 are not whole: cast it first"):
        mix(tf.zeros([2], tf.int32), communicator, schedule=mixtures("ring", 2)[0])
