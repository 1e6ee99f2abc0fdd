"""Collectives inside TensorFlow's graphs: shapes, control flow, ordering and pruning."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import group, integers, run, slowly

from tfscale.ops import all_gather, all_reduce, broadcast, reduce_scatter


class TestShapes:
    @pytest.mark.parametrize(
        ("op", "given", "inferred"),
        [
            (all_reduce, [6, 5], [6, 5]),
            (broadcast, [6, 5], [6, 5]),
            (reduce_scatter, [6, 5], [2, 5]),
            (all_gather, [6, 5], [18, 5]),
            (all_reduce, [None, 5], [None, 5]),
            (reduce_scatter, [None, 5], [None, 5]),
            (all_gather, [None, 5], [None, 5]),
            (all_reduce, None, None),
        ],
    )
    def test_they_are_known_in_the_graph(self, op, given, inferred):
        @tf.function(autograph=False, input_signature=[tf.TensorSpec(given)])
        def function(x):
            return op(x, group(3).communicators[1])

        shape = function.get_concrete_function().outputs[0].shape
        assert (None if shape.rank is None else shape.as_list()) == inferred

    def test_those_of_residuals_too(self):
        @tf.function(autograph=False, input_signature=[tf.TensorSpec([6, 5])] * 2)
        def function(x, residual):
            communicator = group(3).communicators[0]
            return reduce_scatter(x, communicator, residual=residual), all_reduce(
                x, communicator, residual=residual
            )

        shapes = [t.shape.as_list() for t in function.get_concrete_function().outputs]
        assert shapes == [[2, 5], [6, 5], [6, 5], [6, 5]]

    def test_they_may_change_from_call_to_call(self):
        @tf.function(autograph=False, input_signature=[tf.TensorSpec(None)] * 2)
        def function(*xs):
            pairs = list(zip(group(2).communicators, xs, strict=True))
            gathered = [all_gather(tf.reshape(x, [-1]), c) for c, x in pairs]
            return [all_reduce(x, c, wire="bf16") for c, x in pairs], gathered

        for shape in [(3,), (0,), (2, 4), (), (1000, 3), (3,)]:
            xs = integers(2, *shape)
            sums, gathered = function(*xs)
            for y in sums:
                np.testing.assert_array_equal(y, sum(xs))
            for y in gathered:
                np.testing.assert_array_equal(y, np.concatenate([x.ravel() for x in xs]))

    def test_retracing_leaves_the_group_usable(self):
        function = group(2).function(lambda c, x: all_reduce(x, c))
        for dtype in (np.float32, np.float64, np.int32, np.float32):
            for n in (1, 2, 3):
                xs = integers(2, n, dtype=dtype)
                for y in function([tf.constant(x) for x in xs]):
                    np.testing.assert_array_equal(y, sum(xs))

    def test_a_trace_that_fails_leaves_the_group_usable(self):
        """Ranks that were traced before the failure do not count on from there."""

        def body(communicator, x, fails):
            y = all_reduce(x, communicator)
            if fails and communicator.rank:
                raise ArithmeticError
            return y

        xs = integers(3, 4)
        with pytest.raises(ArithmeticError):
            group(3).function(lambda c, x: body(c, x, True))(xs)
        for y in group(3).function(lambda c, x: body(c, x, False))(xs):
            np.testing.assert_array_equal(y, sum(xs))


class TestControlFlow:
    @pytest.mark.parametrize("parallel", [1, 10])
    def test_a_collective_in_a_while_loop(self, parallel):
        xs = integers(3, 100)

        def body(communicator, x):
            def step(i, x, total):
                return i + 1, x, total + all_reduce(x * tf.cast(i, x.dtype), communicator)

            return tf.while_loop(
                lambda i, *_: i < 20,
                step,
                (tf.constant(0), x, tf.zeros_like(x)),
                parallel_iterations=parallel,
            )[2]

        for y in run(body, [tf.constant(x) for x in xs], times=3):
            np.testing.assert_array_equal(y, sum(xs) * sum(range(20)))

    def test_the_gradient_of_a_loop(self):
        xs = [np.float32([1.0]), np.float32([2.0])]

        def body(communicator, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                _, y = tf.while_loop(
                    lambda i, _: i < 3,
                    lambda i, y: (i + 1, all_reduce(y, communicator)),
                    (tf.constant(0), x),
                )
                loss = tf.reduce_sum(y)
            return y, tape.gradient(loss, x)

        for y, dx in run(body, [tf.constant(x) for x in xs]):
            assert y == [3 * 4]
            assert dx == [8]

    @pytest.mark.parametrize("taken", [True, False])
    def test_a_collective_in_a_branch(self, taken):
        def body(communicator, x, flag):
            return tf.cond(
                flag, lambda: all_reduce(x, communicator), lambda: all_reduce(-x, communicator)
            )

        xs = integers(2, 9)
        for y in run(body, [tf.constant(x) for x in xs], [tf.constant(taken)] * 2):
            np.testing.assert_array_equal(y, sum(xs) if taken else -sum(xs))

    def test_a_collective_in_a_function_in_a_function(self):
        def body(communicator, x):
            inner = tf.function(lambda x: all_reduce(x, communicator), autograph=False)
            return inner(inner(x) + 1)

        xs = integers(2, 9)
        for y in run(body, [tf.constant(x) for x in xs]):
            np.testing.assert_array_equal(y, 2 * (sum(xs) + 1))

    def test_a_python_step_many_times(self):
        xs = integers(2, 9)
        function = group(2).function(lambda c, x: all_reduce(x, c))
        for _ in range(200):
            for y in function(xs):
                np.testing.assert_array_equal(y, sum(xs))


class TestOrder:
    def test_ranks_may_issue_collectives_in_any_order(self):
        """Collectives meet by name; on one rank none waits for another."""
        names = [f"bucket {i}" for i in range(6)]
        xs = integers(4, 50)

        def body(communicator, x):
            order = range(6) if communicator.rank % 2 else range(5, -1, -1)
            results = {i: all_reduce(x * (i + 1.0), communicator, name=names[i]) for i in order}
            return [results[i] for i in range(6)]

        for result in run(body, xs, times=5):
            for i, y in enumerate(result):
                np.testing.assert_array_equal(y, sum(xs) * (i + 1))

    def test_many_are_in_flight_at_the_same_time(self):
        """One rank is late for each of five: if they waited for each other, it would be 5 times."""
        xs = integers(2, 50)

        def body(communicator, x):
            def late(i):
                return slowly(x, 0.0 if i else 0.8) if communicator.rank else x

            return [all_reduce(late(i), communicator, name=f"{i}") for i in range(5)], x

        function = group(2).function(body)
        operations = function.get_concrete_function([tf.constant(x) for x in xs]).graph
        found = [op for op in operations.get_operations() if op.type == "TfscaleAllReduce"]
        assert len(found) == 10
        for op in found:
            before = [i.op for i in op.inputs] + list(op.control_inputs)
            assert not [o for o in before if o.type == "TfscaleAllReduce"]
        for result, _ in function(xs):
            for y in result:
                np.testing.assert_array_equal(y, sum(xs))

    def test_an_unused_result_does_not_leave_the_other_ranks_alone(self):
        xs = integers(2, 50)

        def body(communicator, x):
            y = all_reduce(x, communicator, name="wanted by rank 1 alone")
            return y if communicator.rank == 1 else x

        mine, total = run(body, xs, times=3)
        np.testing.assert_array_equal(mine, xs[0])
        np.testing.assert_array_equal(total, sum(xs))

    def test_twice_the_same_is_two_collectives(self):
        """Both have equal arguments on rank 0; merged into one they would leave rank 1 waiting."""
        xs = integers(2, 50)

        def body(communicator, x):
            if communicator.rank == 0:
                return all_reduce(x, communicator), all_reduce(x, communicator)
            return all_reduce(x, communicator), all_reduce(x * 2.0, communicator)

        for one, other in run(body, xs, times=3):
            np.testing.assert_array_equal(one, sum(xs))
            np.testing.assert_array_equal(other, xs[0] + 2 * xs[1])

    def test_constants_are_not_folded_away(self):
        def body(communicator, x):
            return all_reduce(tf.ones([3]), communicator), x

        for y, _ in run(body, integers(2, 1), times=3):
            np.testing.assert_array_equal(y, [2, 2, 2])

    def test_two_groups_share_devices(self):
        xs = integers(3, 50)
        few, all_of_them = group(2), group(3)

        @tf.function(autograph=False)
        def function(*xs):
            def sums(g):
                pairs = zip(g.communicators, xs, strict=False)
                return [all_reduce(x, c) for c, x in pairs]

            return sums(few), sums(all_of_them)

        of_two, of_three = function(*xs)
        for y in of_two:
            np.testing.assert_array_equal(y, xs[0] + xs[1])
        for y in of_three:
            np.testing.assert_array_equal(y, sum(xs))


def test_no_device_scope_is_needed():
    """The placer follows the handle."""

    @tf.function(autograph=False)
    def function(*xs):
        return [all_reduce(x, c) for c, x in zip(group(3).communicators, xs, strict=True)]

    xs = integers(3, 4)
    for y in function(*xs):
        np.testing.assert_array_equal(y, sum(xs))
