"""Graphs of functions of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Traced:
    """A function of one batch, traced once for batches of all sizes.

    If another axis changes, too, one more graph serves all its sizes. ``tf.function`` does this,
    but counts the traces of all functions that are defined in one line together. So it warns of
    retracing in a program that has several MACHs, each of which is traced once.

    Args:
        function: the function of a tensor, or of a structure of tensors.

    Attributes:
        graphs: specifications of batches, and the graph for them.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = tf.function(function, autograph=False)
        self.graphs: list[tuple[Any, Any]] = []

    def __call__(self, x: Any) -> Any:
        """Return the result for a batch."""
        x = tf.nest.map_structure(lambda v: v if tf.is_tensor(v) else tf.convert_to_tensor(v), x)
        specs = tf.nest.map_structure(_of_any_size, x)
        for known, graph in reversed(self.graphs):
            if _fits(specs, known):
                return graph(x)
        if self.graphs and (common := _joined(specs, self.graphs[-1][0])) is not None:
            specs = common
        with tf.init_scope():
            graph = self._function.get_concrete_function(specs)
        self.graphs.append((specs, graph))
        return graph(x)


def _of_any_size(value: Any) -> Any:
    """Return a specification of tensors that differ from this one in their first axis only."""
    spec = tf.type_spec_from_value(value)
    kinds = {tf.TensorSpec: tf.TensorSpec, tf.SparseTensorSpec: tf.SparseTensorSpec}
    kind = kinds.get(type(spec))
    if kind is None or not spec.shape.rank:
        return spec
    return kind([None, *spec.shape[1:]], spec.dtype)


def _fits(specs: Any, known: Any) -> bool:
    if not _alike(specs, known):
        return False
    pairs = zip(tf.nest.flatten(specs), tf.nest.flatten(known), strict=True)
    return all(spec.is_subtype_of(other) for spec, other in pairs)


def _joined(specs: Any, other: Any) -> Any:
    """Return specifications that both fit, or None."""
    if not _alike(specs, other):
        return None
    pairs = zip(tf.nest.flatten(specs), tf.nest.flatten(other), strict=True)
    joined = [one.most_specific_common_supertype([two]) for one, two in pairs]
    return None if None in joined else tf.nest.pack_sequence_as(specs, joined)


def _alike(one: Any, two: Any) -> bool:
    try:
        tf.nest.assert_same_structure(one, two)
    except (TypeError, ValueError):
        return False
    return True
