"""Labels as users give them, and the numbers of their classes.

A label is the number of a class, or its name if classes have names. A sample of a multi-label task
has several: in a ragged tensor, in a dense one that is filled up with -1 or with empty names, in a
list of lists, or in the columns of a sparse matrix of samples times classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.support import arguments
from tfscale.training.extreme.hashing import keys_of

_NONE = -1  # fills up rows of labels
_UNKNOWN = -2


class Labels:
    """The classes: their number, their names, and the keys that are hashed.

    Args:
        classes: the number of classes, or their names, all different.
        multilabel: whether a sample has any number of labels.
    """

    def __init__(self, classes: Any, multilabel: bool) -> None:
        self.names: np.ndarray | None = None
        self.multilabel = multilabel
        if isinstance(classes, (int, np.integer)) or not hasattr(classes, "__iter__"):
            expected = {
                "what": "a number of classes, or a list of their names",
                "example": "50_000",
            }
            self.count = arguments.whole(classes, "classes", 2, (1 << 31) - 2, **expected)
            self.keys = keys_of(self.count)
        else:
            names = arguments.items(classes, "classes", _CLASSES, _name, least=2)
            if len(set(names)) < len(names):
                double = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"classes has the name {double!r} twice; give each name once")
            self.names, self.count, self.keys = np.array(names, object), len(names), keys_of(names)
        self._table: Any = None

    def ids(self, y: Any) -> Any:
        """Return numbers of classes: [samples], or [samples, n] with -1 where a row has fewer."""
        y = _as_tensor(y)
        if isinstance(y, tf.SparseTensor):
            self._check_columns(y)
            y = tf.RaggedTensor.from_value_rowids(
                y.indices[:, 1], y.indices[:, 0], y.dense_shape[0]
            )
            ids = tf.cast(y.to_tensor(_NONE), tf.int32)
        elif isinstance(y, tf.RaggedTensor):
            ids = y.with_flat_values(self._numbers(y.flat_values)).to_tensor(_NONE)
        else:
            self._check_rows(y)
            ids = self._numbers(y)
        return self._shaped(ids)

    def named(self, ids: Any) -> Any:
        """Return the labels of numbers of classes."""
        return ids if self.names is None else self.names[np.asarray(ids)].astype(str)

    def weights(self, class_weight: Any) -> tf.Tensor:
        """Return one weight for each class, 1 for those that a dict does not name."""
        given = arguments.mapping(class_weight, "class_weight", "a dict from labels to weights")
        weights = np.ones(self.count, np.float32)
        labels = np.array(list(given))
        weights[np.asarray(self._numbers(tf.constant(labels), "class_weight"))] = list(
            given.values()
        )
        return tf.constant(weights)

    def _shaped(self, ids: tf.Tensor) -> tf.Tensor:
        if ids.shape.rank is None:  # a dataset that does not say it
            return self._as_declared(ids)
        if not self.multilabel and ids.shape.rank == 2 and ids.shape[1] == 1:
            return ids[:, 0]
        if ids.shape.rank == 1 + self.multilabel:
            return ids
        if ids.shape.rank == 0:
            raise ValueError("y is one label; got data without batches: call batch on the dataset")
        rows = "rows of labels" if self.multilabel else "one label for each sample"
        other = "" if self.multilabel else (
            ". One-hot rows would need a matrix of samples times classes: give the numbers of the "
            "classes. If samples have several labels, make the MACH with multilabel=True"
        )  # fmt: skip
        raise ValueError(f"y is {rows}; got an array of shape {tuple(ids.shape)}{other}")

    def _as_declared(self, ids: tf.Tensor) -> tf.Tensor:
        if self.multilabel:
            return tf.ensure_shape(ids, [None, None])
        return tf.reshape(ids, [tf.shape(ids)[0]])

    def _numbers(self, y: tf.Tensor, name: str = "y") -> tf.Tensor:
        if y.shape.num_elements() == 0:  # empty lists have no type
            return tf.zeros(y.shape, tf.int32)
        if self.names is None:
            if y.dtype == tf.string:
                raise ValueError(
                    f"{name} has names, and this MACH has classes=<a number>; give numbers"
                )
            ids = tf.cast(y, tf.int64)
            wrong = (ids < (_NONE if self.multilabel else 0)) | (ids >= self.count)
            wrong |= tf.cast(ids, y.dtype) != y  # such as 1.5
            expected = f"a number from 0 to {self.count - 1:,}"
        else:
            if y.dtype != tf.string:
                raise ValueError(
                    f"{name} has numbers ({y.dtype.name}), and the classes of this MACH have "
                    "names; give names"
                )
            ids = self._lookup(y)
            wrong, expected = ids == _UNKNOWN, "one of the names in classes"
        with tf.control_dependencies(_checks(wrong, y, name, expected)):
            return tf.cast(ids, tf.int32)

    def _lookup(self, y: tf.Tensor) -> tf.Tensor:
        assert self.names is not None
        if self._table is None:
            with tf.init_scope():
                pairs = tf.lookup.KeyValueTensorInitializer(
                    tf.constant(list(self.names)), tf.range(self.count, dtype=tf.int64)
                )
                self._table = tf.lookup.StaticHashTable(pairs, _UNKNOWN)
        ids = self._table.lookup(y)
        return tf.where(y == "", tf.cast(_NONE, tf.int64), ids) if self.multilabel else ids

    def _check_rows(self, y: tf.Tensor) -> None:
        """Raise for rows of zeros and ones, which could be taken for labels 0 and 1."""
        if self.multilabel and y.shape.rank == 2 and y.shape[1] == self.count:
            raise ValueError(
                f"y has a column for each of the {self.count:,} classes, and a dense y is rows of "
                "labels. One-hot rows would need a matrix of samples times classes: give the "
                "numbers of the classes of each sample, or a sparse matrix"
            )

    def _check_columns(self, y: tf.SparseTensor) -> None:
        if y.shape[1] not in (None, self.count):
            raise ValueError(
                f"y has {y.shape[1]:,} columns, and there are {self.count:,} classes: "
                "a sparse y has a column for each class"
            )


_CLASSES = "a number of classes, or a list of 2 or more names, each a text that is not empty"


def _name(value: Any, name: str) -> str:
    return arguments.text(value, name, "a name, which is a text that is not empty")


def _as_tensor(y: Any) -> Any:
    if isinstance(y, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return y
    if isinstance(y, Mapping):
        raise ValueError(f"y is the labels of one output; got a dict with the keys {list(y)}")
    if hasattr(y, "tocoo"):  # of scipy
        entries = y.tocoo()
        places = np.stack([entries.row, entries.col], 1).astype(np.int64)
        kept = places[entries.data != 0]
        kept = kept[np.lexsort((kept[:, 1], kept[:, 0]))]
        return tf.SparseTensor(kept, np.ones(len(kept), np.float32), entries.shape)
    if isinstance(y, Sequence) and y and isinstance(y[0], (list, tuple, np.ndarray)):
        return tf.ragged.constant([list(row) for row in y])
    array = np.asarray(y)
    if array.dtype == object and array.size and isinstance(array.flat[0], (list, np.ndarray)):
        return tf.ragged.constant([list(row) for row in array])
    return tf.constant(np.array(array.tolist()) if array.dtype == object else array)


def _checks(wrong: tf.Tensor, y: tf.Tensor, name: str, expected: str) -> list[Any]:
    """Raise for labels that are no class; within a graph return the operation that does."""
    words = f"{name} has a label that is no class of this MACH; a label is {expected}"
    found = tf.boolean_mask(tf.reshape(y, [-1]), tf.reshape(wrong, [-1]))
    if not tf.executing_eagerly():
        return [tf.debugging.Assert(~tf.reduce_any(wrong), [f"{words}; got", found])]
    if labels := found.numpy().tolist():
        label = labels[0].decode() if isinstance(labels[0], bytes) else labels[0]
        raise ValueError(f"{words}; got {label!r} and {len(labels) - 1:,} others")
    return []
