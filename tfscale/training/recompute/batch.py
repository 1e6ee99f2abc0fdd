"""The shapes of the batches of a ``fit``, found without reading one.

Reading a batch would change the later ones: a dataset that shuffles would shuffle differently.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.bridge import fit
from tfscale.bridge.graphs import of_first_replica


class UnknownBatch(ValueError):
    """Raised if the shapes of a batch are unknown."""


def batch_of_fit(model: keras.Model, example: Any = None) -> Any:
    """Return the specifications of a replica's batch in a step of the running ``fit``.

    Args:
        model: the model that is being fitted.
        example: a batch with the shapes of the coming ones, if the shapes are unknown otherwise.

    Returns:
        The structure that ``train_step`` takes, of ``tf.TensorSpec`` without unknown lengths.
    """
    iterator = _iterator()
    specs = tf.nest.map_structure(of_first_replica, fit.element_spec(iterator))
    replicas = model.distribute_strategy.num_replicas_in_sync
    if example is not None:
        return _like(specs, example, replicas)
    size = iterator.data_adapter.batch_size or fit.batch_size(iterator)
    return tf.nest.map_structure(lambda spec: _known(spec, size and -(-size // replicas)), specs)


def open_batch_of_fit() -> Any:
    """Return the specifications of a replica's batch that the running ``fit`` knows.

    Lengths that may vary are open: usually the number of samples, since the last batch is smaller.
    If no length is open, the result is None.
    """
    specs = tf.nest.map_structure(of_first_replica, fit.element_spec(_iterator()))
    known = (spec.shape.is_fully_defined() for spec in tf.nest.flatten(specs))
    return None if all(known) else specs


def _iterator() -> Any:
    iterator = fit.iterator()
    if iterator is None:
        raise UnknownBatch("Recompute is a callback for model.fit, which is not running")
    return iterator


def _known(spec: Any, size: int | None) -> Any:
    if not isinstance(spec, tf.TensorSpec):
        raise UnknownBatch(
            f"a batch has {spec}, whose size varies: Recompute plans for tensors of one size. "
            "Give it Recompute(layers=[...]), which needs no sizes."
        )
    if spec.shape.rank is None or None in spec.shape[1:] or (spec.shape.rank and not size):
        raise UnknownBatch(
            f"the shape of a batch is not known: {spec.shape}. Pass the largest batch, as fit will "
            "get it, as an example: Recompute(..., example=(x, y))."
        )
    shape = [size, *spec.shape[1:]] if spec.shape.rank else []
    return tf.TensorSpec(shape, spec.dtype)


def _like(specs: Any, example: Any, replicas: int) -> Any:
    if not isinstance(specs, tuple) or not isinstance(example, tuple):
        example = (example,)
    try:
        tf.nest.assert_same_structure(tuple(specs)[: len(example)], example)
    except (TypeError, ValueError) as error:
        given = tf.nest.map_structure(lambda one: tuple(np.shape(one)), example)
        raise UnknownBatch(
            f"the example has the structure {given} of shapes, and a batch of this fit is {specs}: "
            "pass everything that fit gives to a step, as in example=(x, y)"
        ) from error
    shapes = [tf.shape(tensor).numpy().tolist() for tensor in tf.nest.flatten(example)]
    flat = tf.nest.flatten(specs)
    if len(flat) != len(shapes):
        raise UnknownBatch(
            f"the example has {len(shapes)} tensors, a batch of this fit has {len(flat)}: "
            "pass everything that fit gives to a step, as in example=(x, y)"
        )
    parts = [[-(-shape[0] // replicas), *shape[1:]] if shape else [] for shape in shapes]
    known = [tf.TensorSpec(shape, spec.dtype) for shape, spec in zip(parts, flat, strict=True)]
    return tf.nest.pack_sequence_as(specs, known)
