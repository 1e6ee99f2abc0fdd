"""Numbers of rows that a replica holds of the global batch, and placeholder rows.

If a batch has one row, all replicas but one have no rows. Few layers support that: kernels of
convolutions and recurrent cells refuse arrays without rows, or give results of the wrong shape. So
a replica without rows runs its step on a placeholder: a copy of a row that another replica holds.
The placeholder does not count: its share is 0, it adds nothing to any sum over replicas, and it
changes no metric.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.tensorflow import sum_without_gradient
from tfscale.exchange.rows import with_numbers
from tfscale.exchange.team import can_exchange
from tfscale.native.cell import Cell


@dataclasses.dataclass(frozen=True)
class News:
    """Message of a replica to all others, which travels with another sum.

    Attributes:
        own: function that returns whole numbers of this replica.
        follow: function that gets the sum over all replicas of what each of them gives.
    """

    own: Callable[[], tf.Tensor]
    follow: Callable[[tf.Tensor], None]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Numbers of rows of a global batch, on one replica.

    Args:
        local: number of rows that this replica holds.
        total: number of rows that all replicas hold.
        holders: number of replicas that hold rows.
        uniform: whether all tensors of the batch have equal numbers of rows, on every replica;
            None if there is only one tensor.
        of_others: for each tensor but the first, the numbers of rows that this replica and that
            all replicas hold.

    Attributes:
        absent: whether this replica holds no rows; computed once, since each loss and gradient
            uses it.
        zeros: cache of zeros, by graph, shape and type, since many layers need the same
            constants.
    """

    local: tf.Tensor
    total: tf.Tensor
    holders: tf.Tensor
    uniform: tf.Tensor | None = None
    of_others: Sequence[tuple[tf.Tensor, tf.Tensor]] = ()
    absent: tf.Tensor = dataclasses.field(init=False)
    zeros: dict[Any, tf.Tensor] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "absent", tf.equal(self.local, 0))

    def of_stage(self, stages: int) -> Rows:
        """Return these numbers among the replicas of one stage: all stages read the same rows."""
        if stages == 1:
            return self
        others = [(local, total // stages) for local, total in self.of_others]
        return Rows(
            self.local, self.total // stages, self.holders // stages, self.uniform, tuple(others)
        )

    def of_microbatch(self, local: tf.Tensor) -> Rows:
        """Return the numbers of a microbatch of ``local`` of this replica's rows."""
        return Rows(tf.where(self.absent, tf.zeros_like(local), local), self.total, self.holders)

    def as_absent(self) -> Rows:
        """Return these numbers for a replica whose outputs another replica gives, too."""
        return Rows(tf.zeros_like(self.local), self.total, self.holders)

    def counted(self, value: Any) -> Any:
        """Return the value, or zeros on a replica that holds no rows."""
        return with_numbers(value, lambda x: tf.where(self.absent, self._zeros_like(x), x))

    def _zeros_like(self, value: Any) -> tf.Tensor:
        if tf.executing_eagerly() or not tf.is_tensor(value):
            return tf.zeros_like(value)
        if not value.shape.is_fully_defined():
            return tf.zeros_like(value)
        key = (tf.compat.v1.get_default_graph(), *value.shape, value.dtype)
        if key not in self.zeros:
            with tf.control_dependencies(None):
                self.zeros[key] = tf.zeros(value.shape, value.dtype)
        return self.zeros[key]

    def kept(self, output: Any) -> Any:
        """Return a model's output for a batch, without the output for a placeholder row."""
        if output.shape.rank == 0:
            raise ValueError(
                "predict cannot join the outputs of replicas: the model returns one number for a "
                f"whole batch ({output.name if hasattr(output, 'name') else output}), and predict "
                "needs one result for each row. Return one result for each row, or predict on one "
                "device."
            )
        return rows_unless(self.absent, output)


def shared_out(
    data: Any,
    replicas: int,
    spare: Callable[[int, tf.Tensor], Cell] | None = None,
    news: News | None = None,
) -> tuple[Rows, Any]:
    """Return the numbers of rows of a global batch, and this replica's part with at least one row.

    Args:
        data: structure of tensors, whose first dimension is the batch.
        replicas: number of replicas.
        spare: function that gives the cell in which the replica keeps a row of a dense tensor of
            earlier batches. It is needed if the replica may make this step alone, without asking
            another replica for a row.
        news: whole numbers that replicas tell each other with their numbers of rows.
    """
    tensors = [x for x in tf.nest.flatten(data) if is_batch(x)]
    local, *others = map(number_of_rows, tensors)
    holds = tf.cast(local > 0, tf.int64)
    sent = [local, holds]
    if others:
        differs = tf.reduce_any(tf.not_equal(tf.stack(others), local))
        others = [x * holds for x in others]
        sent += [tf.cast(differs, tf.int64), *others]
    own = tf.stack(sent)
    (summed,) = _sum([own if news is None else tf.concat([own, news.own()], 0)])
    if news is not None:
        news.follow(summed[len(sent) :])
        summed = summed[: len(sent)]
    total, holders, *more = tf.unstack(summed)
    uniform = tf.equal(more[0], 0) if others else None
    rows = Rows(local, total, holders, uniform, tuple(zip(others, more[1:], strict=True)))
    if spare is None:
        some_hold_none = tf.logical_and(holders > 0, holders < replicas)
        lent = tf.cond(some_hold_none, lambda: _lent(tensors, rows, replicas), lambda: tensors)
    else:
        lent = _own(tensors, rows, spare)
    given = iter([_of_known_shape(value, x) for value, x in zip(lent, tensors, strict=True)])
    return rows, tf.nest.map_structure(lambda x: next(given) if is_batch(x) else x, data)


def is_batch(x: Any) -> bool:
    """Return whether a part of a step's data has rows."""
    return getattr(x, "shape", None) is not None


def number_of_rows(x: Any) -> tf.Tensor:
    """Return the number of rows of a dense, sparse or ragged tensor."""
    if isinstance(x, tf.SparseTensor):
        return x.dense_shape[0]
    if isinstance(x, tf.RaggedTensor):
        return x.nrows(tf.int64)
    return tf.shape(x, out_type=tf.int64)[0]


def rows_between(x: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    """Return the rows from ``begin`` on and before ``end`` of a dense, sparse or ragged tensor."""
    if isinstance(x, tf.SparseTensor):
        start = tf.concat([begin[tf.newaxis], tf.zeros_like(x.dense_shape[1:])], 0)
        size = tf.concat([(end - begin)[tf.newaxis], x.dense_shape[1:]], 0)
        return tf.sparse.slice(x, start, size)
    return x[begin:end]


def rows_unless(condition: tf.Tensor, x: Any) -> Any:
    """Return the rows of a tensor; none of them if the condition holds."""
    none = tf.zeros([], tf.int64)
    return rows_between(x, none, tf.where(condition, none, number_of_rows(x)))


def joined_rows(parts: Sequence[Any]) -> Any:
    """Return dense, sparse or ragged tensors, one after another."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
    return tf.concat(list(parts), 0)


def _sum(tensors: list[Any]) -> list[Any]:
    if not tensors:
        return []
    found: list[Any] = sum_without_gradient(tensors)
    return found


def _lent(tensors: list[Any], rows: Rows, replicas: int) -> list[Any]:
    """Return the tensors; if this replica has no rows, with a row of another replica."""
    me = tf.distribute.get_replica_context().replica_id_in_sync_group
    (held,) = _sum([tf.one_hot(me, replicas, rows.local, tf.zeros([], tf.int64), dtype=tf.int64)])
    first = tf.argmax(tf.cast(held > 0, tf.int32), output_type=tf.int32)
    gives = tf.equal(first, me)

    # A replica without a batch does not know how long its rows would be.
    dense = [x for x in tensors if isinstance(x, tf.Tensor)]
    shapes = _sum([tf.where(gives, tf.shape(x), tf.zeros_like(tf.shape(x))) for x in dense])
    blank = [tf.zeros(tf.concat([[1], s[1:]], 0), x.dtype) for x, s in zip(dense, shapes)]
    numbers = [i for i, x in enumerate(dense) if can_exchange(x.dtype)]
    firsts = [tf.where(gives, tf.concat([dense[i], blank[i]], 0)[:1], blank[i]) for i in numbers]
    for i, first in zip(numbers, _sum(firsts), strict=True):
        blank[i] = first

    lent, missing = iter(blank), tf.cast(rows.absent, tf.int32)
    return [
        tf.concat([x, next(lent)[:missing]], 0)
        if isinstance(x, tf.Tensor)
        else tf.cond(rows.absent, lambda x=x: _empty_row(x), lambda x=x: x)
        for x in tensors
    ]


def _own(tensors: list[Any], rows: Rows, spare: Callable[[int, tf.Tensor], Cell]) -> list[Any]:
    """Return the tensors; if this replica has no rows, with a row that it had before."""
    lent = []
    for place, x in enumerate(tensors):
        if isinstance(x, tf.Tensor):
            cell = spare(place, x)
            lent.append(tf.cond(rows.absent, cell.read, lambda x=x: x))
            cell.assign(lent[-1][:1])
        else:
            lent.append(tf.cond(rows.absent, lambda x=x: _empty_row(x), lambda x=x: x))
    return lent


def _empty_row(x: Any) -> Any:
    """Return a row without values: replicas do not exchange sparse and ragged tensors."""
    if isinstance(x, tf.SparseTensor):
        size = tf.concat([tf.ones([1], tf.int64), x.dense_shape[1:]], 0)
        return tf.SparseTensor(x.indices[:0], x.values[:0], size)
    one, none = tf.zeros([2], x.row_splits.dtype), tf.zeros([1], x.row_splits.dtype)
    splits = [one, *([none] * (x.ragged_rank - 1))]
    return tf.RaggedTensor.from_nested_row_splits(x.flat_values[:0], splits, validate=False)


def _of_known_shape(value: Any, like: Any) -> Any:
    """Give a tensor the static shape of the tensor that it was made from."""
    if not isinstance(value, (tf.Tensor, tf.SparseTensor)) or tf.executing_eagerly():
        return value
    if like.shape.rank:
        first, *others = like.shape
        # If the first size is 0, TensorFlow has also set all unknown sizes to 0.
        value.set_shape([first or None, *(size or None for size in others)])
    return value
