"""Routes: a transfer between two ranks, and an all-to-all of equal and unequal numbers of rows."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from helpers import ERROR, LOSSY, group, integers, normal, numpy, run

from tfscale.native.routes import ROUTED_DTYPES
from tfscale.ops import Group, all_to_all, transfer

RANKS = (1, 2, 3, 5)
PIECES = 1024


def of_pair(communicator, x, source=0, target=2, **settings):
    """A transfer that all other ranks know nothing of."""
    if communicator.rank not in (source, target):
        return x
    return transfer(x, communicator, source=source, target=target, **settings)


@pytest.fixture(scope="module", autouse=True)
def ranks_that_have_met():
    for ranks in (2, 3):
        group(ranks).join()


class TestTransfer:
    @pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 3), (700, 2)])
    def test_the_target_gets_what_the_source_has(self, shape):
        xs = normal(3, *shape)
        body = lambda c, x: of_pair(c, x, piece_bytes=PIECES)  # noqa: E731
        for y, expected in zip(run(body, xs), (xs[0], xs[1], xs[0]), strict=True):
            np.testing.assert_array_equal(y, expected)

    def test_every_type_is_sent_unchanged(self):
        xs = integers(2, 6)

        def body(communicator, x):
            return [
                of_pair(communicator, tf.cast(x, dtype), target=1, name=dtype.name)
                for dtype in ROUTED_DTYPES
            ]

        first, second = group(2).function(body)(xs)
        for dtype, sent, got in zip(ROUTED_DTYPES, first, second, strict=True):
            assert got.dtype == dtype
            np.testing.assert_array_equal(tf.cast(got, tf.float32), tf.cast(sent, tf.float32))

    def test_the_target_may_give_a_spec_and_keeps_the_shape(self):
        def body(communicator, x):
            like = x if communicator.rank == 0 else tf.TensorSpec([2, 3])
            y = of_pair(communicator, like, target=1)
            assert y.shape == (2, 3)
            return y

        xs = normal(2, 2, 3)
        np.testing.assert_array_equal(run(body, xs)[1], xs[0])

    def test_a_shape_may_be_known_late(self):
        @tf.function(input_signature=[tf.TensorSpec([None, 3])] * 2, autograph=False)
        def function(*xs):
            communicators = group(2).communicators
            return [of_pair(c, x, target=1) for c, x in zip(communicators, xs, strict=True)]

        for rows in (0, 1, 7):
            xs = normal(2, rows, 3)
            np.testing.assert_array_equal(function(*xs)[1], xs[0])

    @pytest.mark.parametrize("wire", LOSSY)
    def test_wires_round_what_is_sent_and_not_what_the_source_keeps(self, wire):
        xs = normal(2, 700)
        settings = {"wire": wire, "stochastic": False, "target": 1}
        sent, got = run(lambda c, x: of_pair(c, x, **settings), xs)
        np.testing.assert_array_equal(sent, xs[0])
        np.testing.assert_allclose(got, xs[0], rtol=0, atol=ERROR[wire] * 5 + 1e-6)

    def test_the_two_sides_are_bytes_and_nothing_else(self):
        communicators = group(3).communicators
        before = [sum(t.sent for t in c.totals().values()) for c in communicators]
        run(of_pair, integers(3, 1000))
        after = [sum(t.sent for t in c.totals().values()) for c in communicators]
        assert np.subtract(after, before).tolist() == [4000, 0, 0]

    def test_a_rank_may_be_its_own_target(self):
        x = tf.constant([1.0])
        assert transfer(x, group(2).communicators[1], source=1, target=1) is x

    def test_the_result_is_a_constant_on_the_target(self):
        def body(communicator, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(x * of_pair(communicator, x, target=1))
            return tape.gradient(loss, x)

        xs = [tf.constant([2.0, 3.0]), tf.constant([5.0, 7.0])]
        first, second = run(body, xs)
        np.testing.assert_array_equal(first, [4, 6])  # of its own square
        np.testing.assert_array_equal(second, [2, 3])

    def test_a_gradient_goes_back_if_both_ask(self):
        def body(communicator, x, w):
            settings = {"gradient": True, "target": 1, "name": "activation"}
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = of_pair(communicator, x, **settings)
                once, twice = tf.reduce_sum(w * y), tf.reduce_sum(2 * w * y)
            return tape.gradient(once, x), tape.gradient(twice, x)

        xs, weights = integers(2, 4), integers(2, 4, seed=1)
        first, second = run(body, [tf.constant(x) for x in xs], [tf.constant(w) for w in weights])
        for times, source, target in zip((1, 2), first, second, strict=True):
            np.testing.assert_array_equal(source, times * sum(weights))
            np.testing.assert_array_equal(target, np.zeros(4))


def held_up(kind):
    """Rank 0 sends in a loop or a branch, and then something by which rank 1 begins to receive."""

    def body(communicator, x):
        sends = communicator.rank == 0
        late = {"target": 1, "name": "late"}

        def once(x):
            return of_pair(communicator, x, target=1, name="early")

        def sent(x):
            if kind == "branch":
                return tf.cond(x[0] > -1, lambda: once(x), lambda: x)
            loop = lambda i, total: (i + 1, total + once(x + i))  # noqa: E731
            return tf.while_loop(lambda i, _: i < 4, loop, [0.0, tf.zeros_like(x)])[1]

        if sends:
            y = sent(x)
            return y + 0 * of_pair(communicator, y, **late)
        told = of_pair(communicator, x, **late)
        with tf.control_dependencies([told]):
            return sent(tf.identity(x))

    return body


class TestSendsHoldNobodyUp:
    """Ranks would wait for each other until the deadline if a send waited for its target."""

    @pytest.mark.parametrize("kind", ["loop", "branch"])
    def test_in_a_function(self, kind):
        xs = [np.float32([1, 2]), np.float32([7, 7])]
        times, total = (4, 6) if kind == "loop" else (1, 0)
        for y in run(held_up(kind), xs, times=3):
            np.testing.assert_array_equal(y, times * xs[0] + total)

    def test_eagerly(self):
        """Each sends before it receives."""
        communicators = group(2).communicators
        got = [[], []]

        def program(rank):
            communicator = communicators[rank]
            with tf.device(communicator.device):
                for turn in range(3):
                    x = tf.fill([1000], 10.0 * turn + rank)
                    of_pair(communicator, x, rank, 1 - rank, name=f"of {rank}")
                    y = of_pair(communicator, x, 1 - rank, rank, name=f"of {1 - rank}")
                    got[rank].append(float(y[999]))

        threads = [threading.Thread(target=program, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [[1, 11, 21], [0, 10, 20]]

    def test_the_second_of_a_name_waits_for_the_first(self):
        first, second = group(2).communicators
        sent = []

        def send():
            with tf.device(first.device):
                for turn in range(3):
                    of_pair(first, tf.fill([3], float(turn)), target=1, name="turn")
                    sent.append(turn)

        thread = threading.Thread(target=send)
        thread.start()
        with tf.device(second.device):
            for turn in range(3):
                y = of_pair(second, tf.zeros([3]), target=1, name="turn")
                assert y.numpy().tolist() == [turn] * 3
                assert len(sent) <= turn + 2
        thread.join()


def cut(x, sizes):
    return np.split(x, np.cumsum(sizes)[:-1])


def routed(xs, counts):
    """Return what each rank gets if rank s has ``counts[s][t]`` rows for rank t."""
    parts = [cut(x, sizes) for x, sizes in zip(xs, counts, strict=True)]
    return [np.concatenate([part[t] for part in parts]) for t in range(len(xs))]


@pytest.mark.parametrize("ranks", RANKS)
class TestAllToAll:
    @pytest.mark.parametrize("rows", [0, 1, 3, 200])
    def test_each_gets_its_rows_of_each(self, ranks, rows):
        xs = normal(ranks, rows * ranks, 3)
        counts = np.full([ranks, ranks], rows)
        ys = run(lambda c, x: all_to_all(x, c, piece_bytes=PIECES), xs)
        for y, expected in zip(ys, routed(xs, counts), strict=True):
            np.testing.assert_array_equal(y, expected)

    def test_every_type(self, ranks):
        xs = integers(ranks, ranks, 2)

        def body(communicator, x):
            return [all_to_all(tf.cast(x, dtype), communicator) for dtype in ROUTED_DTYPES]

        ys = group(ranks).function(body)(xs)
        for place, dtype in enumerate(ROUTED_DTYPES):
            cast = [tf.cast(tf.cast(x, dtype), tf.float32).numpy() for x in xs]
            for y, expected in zip(ys, routed(cast, np.ones([ranks, ranks], int)), strict=True):
                assert y[place].dtype == dtype
                np.testing.assert_array_equal(tf.cast(y[place], tf.float32), expected)

    @pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64])
    def test_wires_round_all_but_the_ranks_own(self, ranks, dtype):
        xs = [tf.cast(x, dtype) for x in normal(ranks, 300 * ranks)]

        def body(communicator, x):
            return [all_to_all(x, communicator, wire=w, stochastic=False) for w in LOSSY]

        own = 2.0**-8 if dtype == tf.bfloat16 else 2.0**-11
        ys = group(ranks).function(body)(xs)
        values = [tf.cast(x, tf.float32).numpy() for x in xs]
        expected = routed(values, np.full([ranks, ranks], 300))
        for rank in range(ranks):
            for wire, y in zip(LOSSY, ys[rank], strict=True):
                y = tf.cast(y, tf.float32).numpy()
                mine = slice(300 * rank, 300 * (rank + 1))
                np.testing.assert_array_equal(y[mine], expected[rank][mine])
                limit = (ERROR[wire] + own) * 5 + 1e-6
                np.testing.assert_allclose(y, expected[rank], rtol=0, atol=limit)

    def test_the_gradient_goes_back(self, ranks):
        def body(communicator, x, w):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = all_to_all(x, communicator, name="exchange")
                once, twice = tf.reduce_sum(w * y), tf.reduce_sum(2 * w * y)
            return tape.gradient(once, x), tape.gradient(twice, x)

        xs, weights = integers(ranks, 2 * ranks), integers(ranks, 2 * ranks, seed=1)
        found = run(body, [tf.constant(x) for x in xs], [tf.constant(w) for w in weights])
        expected = routed(weights, np.full([ranks, ranks], 2))  # an all-to-all is its own inverse
        for (once, twice), back in zip(found, expected, strict=True):
            np.testing.assert_array_equal(once, back)
            np.testing.assert_array_equal(twice, 2 * back)

    @pytest.mark.parametrize("known", [False, True], ids=["counts are sent", "counts are known"])
    def test_unequal_numbers_of_rows_and_none(self, ranks, known):
        """Some ranks have nothing for some, for all, or at all."""

        @tf.function(autograph=False, reduce_retracing=True)
        def function(xs, counts, weights):
            results = []
            for c, x, sizes, w in zip(group(ranks).communicators, xs, counts, weights, strict=True):
                received = tf.stack(counts)[:, c.rank] if known else None
                with tf.device(c.device), tf.GradientTape() as tape:
                    tape.watch(x)
                    y, got = all_to_all(
                        x, c, sizes=sizes, received=received, piece_bytes=PIECES, name="tokens"
                    )
                    loss = tf.reduce_sum(w * y)
                results.append((y, got, tape.gradient(loss, x)))
            return results

        rng = np.random.default_rng(ranks)
        for turn in range(6):
            counts = rng.integers(0, (1, 3, 700)[turn % 3] + 1, (ranks, ranks))
            counts[turn % ranks] *= turn % 2
            counts[:, (turn + 1) % ranks] *= turn // 2 % 2
            xs = [rng.normal(size=(n, 2)).astype("f4") for n in counts.sum(1)]
            expected = routed(xs, counts)
            weights = [rng.normal(size=y.shape).astype("f4") for y in expected]
            back = routed(weights, counts.T)
            found = function(
                [tf.constant(x) for x in xs],
                [tf.constant(c, tf.int32) for c in counts],
                [tf.constant(w) for w in weights],
            )
            for rank, (y, got, dx) in enumerate(numpy(found)):
                np.testing.assert_array_equal(y, expected[rank])
                np.testing.assert_array_equal(got, counts[:, rank])
                np.testing.assert_array_equal(dx, back[rank])

    def test_bytes_are_those_that_must_be_sent(self, ranks):
        rng = np.random.default_rng(0)
        counts = rng.integers(0, 5, (ranks, ranks))
        xs = [np.ones([n, 8], np.float16) for n in counts.sum(1)]

        def body(communicator, x, sizes, received):
            all_to_all(x, communicator, sizes=sizes, received=received, name="counted")

        group(ranks).function(body)(xs, list(counts), list(counts.T))
        for c in group(ranks).communicators:
            last = [e.sent for e in c.log() if e.bucket.label == "counted"][-1:]
            others = np.delete(counts[c.rank], c.rank).sum()
            assert last == ([16 * others] if ranks > 1 else [])


class TestWhatIsRefused:
    def test_a_rank_that_has_no_part(self):
        with pytest.raises(ValueError, match="of rank 0 or of rank 2.*have no part"):
            transfer([1.0], group(3).communicators[1], source=0, target=2)

    def test_a_spec_of_unknown_shape(self):
        spec = tf.TensorSpec([None, 3])
        with pytest.raises(ValueError, match="x is a TensorSpec of a known shape"):
            transfer(spec, group(2).communicators[1], source=0, target=1)

    def test_a_spec_on_the_source(self):
        with pytest.raises(ValueError, match="x is a tensor"):
            transfer(tf.TensorSpec([3]), group(2).communicators[0], source=0, target=1)

    def test_types_that_are_no_numbers(self):
        for op in (all_to_all, lambda x, c: transfer(x, c, source=0, target=1)):
            with pytest.raises(ValueError, match="x is a tensor of float32.*Cast string"):
                op(["a", "b"], group(2).communicators[0])

    def test_integers_on_a_wire_that_rounds(self):
        for dtype in (tf.int32, tf.int8, tf.bool):
            with pytest.raises(tf.errors.InvalidArgumentError, match="carries floats only"):
                run(lambda c, x, d=dtype: all_to_all(tf.cast(x, d), c, wire="int8"), [[0, 1]] * 2)

    def test_rows_that_cannot_be_shared(self):
        with pytest.raises(ValueError, match="multiple of the 2 ranks.*pass sizes"):
            all_to_all([1.0, 2.0, 3.0], group(2).communicators[0])

        @tf.function(input_signature=[tf.TensorSpec([None])] * 2, autograph=False)
        def function(*xs):
            return [all_to_all(x, c) for c, x in zip(group(2).communicators, xs, strict=True)]

        with pytest.raises(tf.errors.InvalidArgumentError, match="has 3 rows, but the sizes add"):
            function(*[tf.ones([3])] * 2)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ([1, 1], "x has 3 rows, but the sizes add up to 2"),
            ([4, -1], "-1 is no number of rows"),
            ([2**62, 2**62], "is no number of rows"),
        ],
    )
    def test_sizes_that_do_not_fit(self, sizes, message):
        def body(communicator, x):
            given = tf.constant(sizes, tf.int64)
            return all_to_all(x, communicator, sizes=given, received=given)

        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            run(body, [np.ones(3, np.float32)] * 2)

    @pytest.mark.parametrize("name", ["sizes", "received"])
    @pytest.mark.parametrize("value", [[1], [1.0, 2.0], "a"])
    def test_sizes_that_are_none(self, name, value):
        given = {"sizes": [1, 2], "received": [1, 2], name: value}
        with pytest.raises(ValueError, match=f"{name} is"):
            all_to_all(tf.ones([3]), group(2).communicators[0], **given)

    def test_received_without_sizes(self):
        with pytest.raises(ValueError, match="received is None, since there are no sizes"):
            all_to_all(tf.ones([2]), group(2).communicators[0], received=[1, 1])

    @pytest.mark.parametrize("rows", [0, 2])
    def test_two_sides_of_other_shapes(self, rows):
        """The error names the transfer; an empty one says no less."""
        few = Group.local(["CPU:0", "CPU:1"], deadline=60)
        few.join()

        def body(communicator, x):
            shape = [rows, 3] if communicator.rank == 0 else [rows, 2]
            name = "activation 0 to 1, microbatch 3"
            return transfer(tf.ones(shape), communicator, source=0, target=1, name=name)

        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            few.function(body)([0.0, 0.0])
        assert "activation 0 to 1, microbatch 3" in str(raised.value)
        assert f"route of float[{rows},3]" in str(raised.value)
        assert f"route of float[{rows},2]" in str(raised.value)

    def test_ranks_that_get_other_numbers_than_they_expect(self):
        few = Group.local(["CPU:0", "CPU:1"], deadline=60)

        def body(communicator, x):
            received = [1, 1] if communicator.rank == 0 else [2, 1]
            return all_to_all(x, communicator, sizes=[1, 1], received=received, name="tokens")

        with pytest.raises(tf.errors.OpError, match="'body/tokens_1'.*sizes differ|'tokens'"):
            few.function(body)([tf.ones([2]), tf.ones([2])])
