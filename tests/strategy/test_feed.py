"""Batches of replicas: they come in turn, from an iterator that tf.data does not tune."""

import gc
import typing

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategy.twins import two
from tfscale import Grid, ScaleStrategy
from tfscale.bridge.feed import untuned
from tfscale.bridge.fit import EpochIterator

ROWS, BATCH = 11, 4
WIDTH = 16  # of rows that begin where TensorFlow takes an array's memory as it is


@pytest.fixture(scope="module")
def strategy():
    return two()


def numbers():
    return tf.data.Dataset.range(ROWS).batch(BATCH)


def halves(strategy, batch):
    return [part.numpy().tolist() for part in strategy.experimental_local_results(batch)]


IN_TURN = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10]]]


def test_replicas_get_a_batch_in_order(strategy):
    distributed = strategy.experimental_distribute_dataset(numbers())
    for _ in range(2):  # each iterator begins anew
        assert [halves(strategy, batch) for batch in distributed] == IN_TURN


def test_a_replica_that_gets_nothing_gets_no_rows(strategy):
    dataset = tf.data.Dataset.range(5).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert [halves(strategy, batch) for batch in distributed] == [[[0, 1], [2, 3]], [[4], []]]


def test_functions_take_iterators_and_datasets(strategy):
    distributed = strategy.experimental_distribute_dataset(numbers().take(2))

    def total(batch):
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, [batch]), axis=None)

    @tf.function
    def of_two(iterator):
        return total(next(iterator)), total(next(iterator))

    @tf.function
    def of_all(dataset):
        found = tf.zeros([], tf.int64)
        for batch in dataset:
            found += total(batch)
        return found

    assert [int(x) for x in of_two(iter(distributed))] == [6, 22]
    assert of_all(distributed) == 28


def test_an_iterator_ends(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(numbers()))
    assert [halves(strategy, next(iterator)) for _ in IN_TURN] == IN_TURN
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_dataset_for_each_replica_is_taken_in_turns(strategy):
    distributed = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.range(4).batch(context.get_per_replica_batch_size(2))
    )
    assert [halves(strategy, batch) for batch in distributed] == [[[0], [1]], [[2], [3]]]


@pytest.mark.parametrize("of_each", [False, True])
def test_a_function_that_loops_over_a_dataset_gives_a_team_the_same_rows(of_each):
    """Replicas that hold slices of one model read the same rows."""
    devices = [f"CPU:{i}" for i in range(4)]
    four = ScaleStrategy(devices=devices, grid=Grid(tensor=2), tensor={"ffn/up": "columns"})
    if of_each:
        data = four.distribute_datasets_from_function(lambda _: numbers())
    else:
        data = four.experimental_distribute_dataset(numbers())

    @tf.function
    def totals(batches):
        found = tf.TensorArray(tf.int64, 0, dynamic_size=True)
        for batch in batches:
            rows = four.run(lambda x: tf.reshape(tf.reduce_sum(x), [1]), args=(batch,))
            found = found.write(found.size(), tf.concat(four.experimental_local_results(rows), 0))
        return found.stack()

    every = totals(data).numpy()
    assert np.array_equal(every[:, 0], every[:, 1]) and np.array_equal(every[:, 2], every[:, 3])
    assert every[:, ::2].sum() == sum(range(ROWS))


def test_tuning_is_off_unless_it_is_asked_for():
    assert untuned(numbers()).options().autotune.enabled is False
    options = tf.data.Options()
    options.autotune.enabled = True
    assert untuned(numbers().with_options(options)).options().autotune.enabled is True


def test_other_options_of_a_dataset_stay():
    options = tf.data.Options()
    options.deterministic = False
    options.threading.private_threadpool_size = 3
    left = untuned(numbers().with_options(options)).options()
    assert left.deterministic is False
    assert left.threading.private_threadpool_size == 3


def test_what_autotune_would_choose_still_runs(strategy):
    dataset = numbers().map(lambda x: x + 1, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    batches = list(strategy.experimental_distribute_dataset(dataset))
    found = [x for batch in batches for part in halves(strategy, batch) for x in part]
    np.testing.assert_array_equal(found, np.arange(ROWS) + 1)


def aligned(numbers):
    """Return equal numbers in memory that TensorFlow need not copy."""
    raw = np.zeros(numbers.size + WIDTH, np.float32)
    start = -raw.ctypes.data % 64 // raw.itemsize
    array = raw[start : start + numbers.size].reshape(numbers.shape)
    array[:] = numbers
    return array


class Halves(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.pair = x, y

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return tuple(array[8 * i : 8 * i + 8] for array in self.pair)


def from_generator(x, y):
    spec = tf.TensorSpec([None, WIDTH])
    return tf.data.Dataset.from_generator(
        lambda: iter(Halves(x, y)), output_signature=(spec, spec)
    ).take(2)


def from_a_function(x, y):
    def half(i):
        pair = tf.numpy_function(Halves(x, y).__getitem__, [i], [tf.float32] * 2, stateful=False)
        return [tf.ensure_shape(array, [None, WIDTH]) for array in pair]

    return tf.data.Dataset.range(2).map(lambda i: tuple(half(i)))


def from_another_dataset(x, y):
    inner = from_generator(x, y)
    return tf.data.Dataset.range(1).interleave(lambda _: inner.map(lambda *pair: pair))


@pytest.mark.parametrize(
    "data",
    [Halves, from_generator, from_a_function, from_another_dataset],
    ids=lambda kind: kind.__name__,
)
def test_arrays_that_python_gives_stay_as_they_are(strategy, data):
    random = np.random.default_rng(0)
    x, y = (aligned(random.normal(size=[16, WIDTH])) for _ in range(2))
    before = x.copy(), y.copy()
    with strategy.scope():
        model = keras.Sequential([keras.Input([WIDTH]), keras.layers.Dense(WIDTH)])
        model.compile("sgd", "mse")
    model.fit(data(x, y), verbose=0)
    np.testing.assert_array_equal((x, y), before)


class Pair(typing.NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    "nested", [lambda x: x, lambda x: (x,), lambda x: ((x, x),), lambda x: {"a": Pair(x, x)}]
)
def test_what_python_gives_keeps_its_structure(strategy, nested):
    """A tuple of one, too: two inputs of a model, without targets."""
    array, spec = np.arange(4, dtype=np.float32), nested(tf.TensorSpec([None]))
    data = tf.data.Dataset.from_generator(lambda: [nested(array)], output_signature=spec)
    (batch,) = strategy.experimental_distribute_dataset(data)
    tf.nest.assert_same_structure(batch, nested(array), expand_composites=False)
    for part in tf.nest.flatten(batch):
        assert halves(strategy, part) == [[0, 1], [2, 3]]


@pytest.mark.slow
def test_a_training_leaves_no_iterator_behind(strategy):
    """An iterator with threads of its own would live until Python looks for cycles."""
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.zeros([8, 4], np.float32), np.zeros([8, 1], np.float32)
    gc.collect()
    gc.disable()
    try:
        model.fit(x, y, batch_size=4, verbose=0)
        left = [one for one in gc.get_objects() if isinstance(one, EpochIterator)]
    finally:
        gc.enable()
    assert not left
