"""Keras reads a batch for no more than its shapes; what is trained on must not notice.

One device reads none for that. Reading one would be seen: a shuffle gives another order each time,
a ``PyDataset`` hears of one more epoch, and threads that read ahead take from what comes next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfscale.bridge.calls import caller
from tfscale.bridge.fit import EpochIterator, fitted, wants_only_shapes
from tfscale.bridge.hooks import EPOCH_BATCHES, EPOCH_ITERATOR
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.tensorflow import split_by_replica

if not KERAS_2:  # which has no epoch iterators
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter


def shapes_apart(dataset: Any, distributed: Any, distribute: Callable[[Any], Any]) -> None:
    """Let the epoch iterator that distributes a dataset give a batch for its shapes apart.

    Args:
        dataset: the dataset that the epoch iterator reads.
        distributed: the distributed dataset.
        distribute: a function that distributes a dataset.
    """
    reads = caller(EpochIterator)
    if reads is None:
        return
    begun: list[Any] = []  # an iterator that has given a batch for its shapes
    adapter = reads.data_adapter

    def enumerate_iterator(original: Callable[..., Any], epochs: Any) -> Any:
        if not wants_only_shapes():
            return original(epochs)
        return iter([(0, 0, iter([batch()]))])

    def batch() -> Any:
        if isinstance(adapter, GeneratorDataAdapter):  # it keeps the batch that is taken from it
            return next(iter(distribute(_first(dataset))))
        found = _shapes(distributed)
        if found is not None:
            return found
        if isinstance(adapter, PyDatasetAdapter):
            return next(iter(distribute(_first(_without_threads(adapter).get_tf_dataset()))))
        begun[:] = [_Begun(iter(distributed))]
        return begun[0].batch()

    def get_iterator(original: Callable[..., Any], epochs: Any) -> Any:
        return begun.pop() if begun else distributed

    # With itself among its attributes the iterator would live, and its threads, until Python looks
    # for cycles, which may be after a hundred trainings.
    EPOCH_BATCHES.put(reads, enumerate_iterator, weakly=True)
    EPOCH_ITERATOR.put(reads, get_iterator, weakly=True)


def _first(dataset: Any) -> Any:
    """Return a dataset of the first batch; nothing is read ahead."""
    return dataset._input_dataset.take(1)


def _without_threads(adapter: Any) -> Any:
    alone = copy.copy(adapter)
    alone.enqueuer, alone.shuffle = None, False
    return alone


def _shapes(distributed: Any) -> Any:
    """Return the shapes of a replica's batches if one device would see the same, else None.

    One device that runs eagerly sees numbers, never an unknown size.
    """
    batch = tf.nest.map_structure(lambda one: split_by_replica(one, i=0), distributed.element_spec)
    shapes = [spec.shape for spec in tf.nest.flatten(batch)]
    known = all(
        shape.is_fully_defined() if fitted().run_eagerly else shape.rank is not None
        for shape in shapes
    )
    return batch if known else None


class _Begun:
    """An iterator whose first batch is known and has not been given yet."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._first = iterator.get_next_as_optional()
        self._given = False

    def batch(self) -> Any:
        return self._first.get_value()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError as error:
            raise StopIteration from error

    def get_next(self) -> Any:
        if self._given:
            return self._iterator.get_next()
        self._given = True
        return self.batch()

    def get_next_as_optional(self) -> Any:
        if self._given:
            return self._iterator.get_next_as_optional()
        self._given = True
        return self._first
