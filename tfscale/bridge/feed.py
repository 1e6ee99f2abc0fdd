"""Batches of replicas on CPUs, which take them in turn from one iterator of the host.

TensorFlow gives each device an iterator of its own behind another one of the host. For GPUs these
copy the next batch ahead. For CPUs there is nothing to copy, and making these iterators takes most
of the time that a small model needs to begin an epoch: six traced functions per device and epoch.

tf.data tunes a pipeline in a thread that sleeps for up to a minute, and that can miss the signal
that its iterator ends. Whoever drops the iterator, as Keras does after an epoch or a validation,
then waits until the thread wakes. So the strategy turns tuning off, and ``tf.data.AUTOTUNE`` means
as many calls at once as there are processors. A dataset whose own options ask for tuning gets it.

A batch that a Python function gives, as ``from_generator`` does, can be a user's array itself:
TensorFlow takes its memory, and marks it as not to be written to. Slices of it have lost that mark,
and replicas get slices: an operation that may write to its argument would change the user's data.
So replicas get copies of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.bridge.tensorflow import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    DistributedDatasetsFromFunctionSpec,
    DistributedDatasetSpec,
    DistributedIterator,
    DistributedIteratorSpec,
    VariantDataset,
    WorkerIterator,
    WorkerIteratorSpec,
    split_by_replica,
)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset without tf.data's tuning, unless its own options ask for it."""
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


class Batches(DistributedDataset):
    """A dataset of global batches, of which each local replica gets its part."""

    _cloned_datasets: list[tf.data.Dataset]

    def build(self, dataset_to_replace: tf.data.Dataset | None = None) -> None:
        super().build(dataset_to_replace)
        if _may_give_memory_of_python(dataset_to_replace or self._original_dataset):
            self._cloned_datasets = [_copied(parts) for parts in self._cloned_datasets]

    def __iter__(self) -> DistributedIterator:
        return _iterator(self, self._cloned_datasets)

    @property
    def _type_spec(self) -> Any:
        return self._spec_of(_BatchesSpec)

    def _spec_of(self, kind: Any) -> Any:
        return kind(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
        )


class WholeBatches(Batches):
    """A dataset of global batches, of which each replica takes its rows in the step itself.

    The strategy's ``extended.part`` says which rows.
    """

    def _create_cloned_datasets_from_dataset(self, dataset: Any, *_: Any) -> None:
        """Keep the dataset, whose batches TensorFlow would cut into equal parts."""
        spec = tf.nest.map_structure(_of_any_length, dataset.element_spec)
        self._cloned_datasets = [VariantDataset(dataset._variant_tensor, spec)]

    @property
    def _type_spec(self) -> Any:
        return self._spec_of(_WholeBatchesSpec)


def _of_any_length(spec: Any) -> Any:
    """Return the specification of a batch's part, with any number of rows."""
    try:
        return spec._unbatch()._batch(None)
    except (AttributeError, ValueError):  # no batch: None, or a type of the user's
        return spec


class BatchesOfReplicas(DistributedDatasetsFromFunction):
    """A dataset of replicas' batches, which local replicas take in turn."""

    def __iter__(self) -> DistributedIterator:
        return _iterator(self, self._datasets)

    @property
    def _type_spec(self) -> Any:
        given = (self._input_workers, self._element_spec, self._strategy, self._options)
        return _BatchesOfReplicasSpec(*given)


_CALLS_OF_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def _may_give_memory_of_python(dataset: tf.data.Dataset) -> bool:
    """Whether a Python function gives elements of the dataset, as far as can be seen."""
    if isinstance(dataset, VariantDataset):
        return True  # this one says nothing of how it was made
    for function in dataset._functions():
        graph = function.function.graph
        uses_a_dataset = any(x.dtype == tf.variant for x in graph.external_captures)
        if uses_a_dataset or _CALLS_OF_PYTHON & _operations(graph.as_graph_def()):
            return True
    return any(map(_may_give_memory_of_python, dataset._inputs()))


def _operations(graph: Any) -> set[str]:
    functions = [node.op for function in graph.library.function for node in function.node_def]
    return {*functions, *(node.op for node in graph.node)}


def _copied(parts: tf.data.Dataset) -> tf.data.Dataset:
    is_tuple = type(parts.element_spec) is tuple  # which map passes as so many arguments

    def copies(*element: Any) -> Any:
        return tf.nest.map_structure(
            lambda x: tf.raw_ops.DeepCopy(x=x) if x.dtype.is_numpy_compatible else x,
            element if is_tuple else element[0],
            expand_composites=True,
        )

    return parts.map(copies)


def _iterator(distributed: Any, datasets: list[tf.data.Dataset]) -> DistributedIterator:
    (dataset,) = datasets  # a process has one host
    (host,) = distributed._input_workers.worker_devices
    devices = distributed._input_workers.compute_devices_for_worker(0)
    of_a_step = len(devices) // distributed._strategy.extended.takers
    ahead = dataset.prefetch(of_a_step)  # of the next step, while this one is trained
    iterator = _Iterator(
        distributed._input_workers,
        [_Turns(ahead, host, devices, options=distributed._options, canonicalize_devices=True)],
        distributed._strategy,
        cardinality=distributed._cardinality,
        enable_get_next_as_optional=distributed._enable_get_next_as_optional,
        options=distributed._options,
    )
    iterator._element_spec = distributed._element_spec
    return iterator


# To TensorFlow, datasets and iterators of replicas are composite tensors: a function takes and
# returns what their specs say.


class _BatchesSpec(DistributedDatasetSpec):
    value_type = property(lambda self: Batches)

    def _from_components(self, components: list[Any]) -> Batches:
        made: Batches = self.value_type(
            self._input_workers,
            self._strategy,
            components=components,
            element_spec=self._element_spec,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
        )
        return made


class _WholeBatchesSpec(_BatchesSpec):
    value_type = property(lambda self: WholeBatches)


class _BatchesOfReplicasSpec(DistributedDatasetsFromFunctionSpec):
    value_type = property(lambda self: BatchesOfReplicas)

    def _from_components(self, components: list[Any]) -> BatchesOfReplicas:
        return BatchesOfReplicas(
            self._input_workers,
            self._strategy,
            components=components,
            element_spec=self._element_spec,
            options=self._options,
        )


class _Iterator(DistributedIterator):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for turns in self._iterators:
            turns.part = self._strategy.extended.part
            turns.takers = self._strategy.extended.takers

    @property
    def _type_spec(self) -> _IteratorSpec:
        return _IteratorSpec(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            self._cardinality,
            self._enable_get_next_as_optional,
        )


class _IteratorSpec(DistributedIteratorSpec):
    value_type = property(lambda self: _Iterator)

    @property
    def _component_specs(self) -> list[Any]:
        ((host, devices),) = self._input_workers._worker_device_pairs
        spec = tf.nest.map_structure(lambda one: split_by_replica(one, i=0), self._element_spec)
        return [_TurnsSpec(host, devices, spec, self._options, self._canonicalize_devices)]

    def _from_components(self, components: list[Any]) -> _Iterator:
        return _Iterator(
            self._input_workers,
            strategy=self._strategy,
            components=components,
            element_spec=self._element_spec,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
        )


class _Turns(WorkerIterator):
    """The host's iterator, asked once for each replica and step, or for several that take the same.

    Attributes:
        part: function that returns, of a whole batch, the rows of a local replica; then the
            iterator is asked once for a step. None if the iterator gives the rows of a replica.
        takers: number of replicas, one after the other, that all take the same rows.
    """

    part: Callable[[Any, int], Any] | None = None
    takers = 1

    def _make_iterator(self) -> None:
        with tf.device(self._worker):
            self._iterator = iter(self._dataset)

    def get_next_as_list(self, name: str | None = None) -> list[Any]:
        with tf.device(self._worker):
            if self.part is None:
                return self._taken(self._iterator.get_next)
            batch = self._iterator.get_next()
            return [self.part(batch, place) for place in range(len(self._devices))]

    def get_next_as_optional_list(self) -> list[Any]:
        with tf.device(self._worker):
            if self.part is None:
                return self._taken(self._iterator.get_next_as_optional)
            batch = self._iterator.get_next_as_optional()
            return [_OptionalPart(batch, self.part, i) for i in range(len(self._devices))]

    def _taken(self, take: Callable[[], Any]) -> list[Any]:
        found = [take() for _ in range(len(self._devices) // self.takers)]
        return [rows for rows in found for _ in range(self.takers)]

    @property
    def _type_spec(self) -> _TurnsSpec:
        return _TurnsSpec(
            self._worker,
            self._devices,
            self._element_spec,
            self._options,
            self._canonicalize_devices,
        )


class _OptionalPart:
    """The rows of one replica, if there is a batch: what TensorFlow asks of an optional."""

    def __init__(self, batch: Any, part: Callable[[Any, int], Any], place: int) -> None:
        self._batch, self._part, self._place = batch, part, place
        self.element_spec = batch.element_spec
        self.has_value = batch.has_value

    def get_value(self) -> Any:
        return self._part(self._batch.get_value(), self._place)


class _TurnsSpec(WorkerIteratorSpec):
    value_type = property(lambda self: _Turns)

    @property
    def _component_specs(self) -> list[Any]:
        return [tf.data.IteratorSpec(self._element_spec)]

    def _from_components(self, components: list[Any]) -> _Turns:
        return _Turns(
            worker=self._worker,
            devices=self._devices,
            components=components,
            element_spec=self._element_spec,
            options=self._options,
            canonicalize_devices=self._canonicalize_devices,
        )
