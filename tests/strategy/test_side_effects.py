"""Calls of Python, assertions, prints and lookups in the steps of replicas of one process."""

import tensorflow as tf

import tfscale


def test_side_effects_wait_for_earlier_ones_of_their_replica_only():
    strategy = tfscale.ScaleStrategy("ring", devices=["CPU:0", "CPU:1"], deadline=20)
    seen = []

    def note(x):
        seen.append(float(x))
        return x

    def of_replica():
        first = tf.numpy_function(note, [tf.ones([])], tf.float32)
        total = tf.distribute.get_replica_context().all_reduce("SUM", tf.ensure_shape(first, []))
        with tf.control_dependencies([tf.debugging.assert_equal(total, 2.0)]):
            tf.numpy_function(note, [total], tf.float32)
        tf.numpy_function(note, [tf.constant(3.0)], tf.float32)

    tf.function(lambda: strategy.run(of_replica))()
    assert sorted(seen) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0], "each runs, though nobody reads it"
    assert seen.index(3.0) > seen.index(2.0), "those of a replica keep their order"


def test_a_lookup_in_a_table_waits_for_no_other_replica():
    strategy = tfscale.ScaleStrategy("ring", devices=["CPU:0", "CPU:1"], deadline=20)
    made = tf.lookup.KeyValueTensorInitializer(["a", "b"], [3.0, 4.0])
    table = tf.lookup.StaticHashTable(made, -1.0)

    def of_replica():
        first = table.lookup(tf.constant("a"))
        total = tf.distribute.get_replica_context().all_reduce("SUM", first)
        with tf.control_dependencies([total]):
            return total + table.lookup(tf.constant("b"))

    found = tf.function(lambda: strategy.run(of_replica))()
    assert [float(x) for x in strategy.experimental_local_results(found)] == [10.0, 10.0]
