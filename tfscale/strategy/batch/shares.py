"""Shares of the global batch: how many of its rows each replica takes.

TensorFlow cuts each batch into equal parts while it reads ahead. With shares, every worker reads
whole batches, and the step itself takes a replica's rows. So a change of shares takes effect in the
next step, on all replicas alike; no function is traced again, since the sizes of parts are never
part of a shape. Losses, gradients, metrics and statistics are weighted by rows already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.native.group import host_of
from tfscale.strategy.batch.rows import is_batch, number_of_rows, rows_between
from tfscale.support import arguments

MEASURED = "auto"
UNIT = 1 << 16  # the largest weight; weights are whole numbers, so that all machines round alike
OWNER = "shares of the batch"

_EXPECTED = (
    "'auto', a list with a positive number for each replica, such as [3, 1], or a mapping from "
    "workers or replicas to numbers, such as {'worker:1': 0.5}"
)
_NAME = re.compile(r"(worker|replica):(\d+)")
_NOT_BATCHED = (
    "shares={!r} cuts batches into rows, and an element of this dataset has a part without rows, "
    "{}. Call dataset.batch(...) with the size of the global batch first"
)
_OWN_ROWS = (
    "shares={!r} cuts batches that every worker reads whole, and this dataset's auto_shard_policy "
    "is {}: each worker reads rows of its own. Use AutoShardPolicy.DATA, or leave shares out"
)


def checked(shares: Any, name: str) -> Any:
    """Return a valid argument ``shares``, or raise."""
    if isinstance(shares, str) and shares == MEASURED:
        return shares
    if isinstance(shares, Mapping):
        for key in arguments.mapping(shares, name, _EXPECTED):
            if not isinstance(key, str) or not _NAME.fullmatch(key):
                raise arguments.wrong(shares, name, _EXPECTED)
        numbers = list(shares.values())
    elif isinstance(shares, (list, tuple)):
        numbers = list(shares)
    else:
        raise arguments.wrong(shares, name, _EXPECTED)
    if not numbers:
        raise arguments.wrong(shares, name, _EXPECTED)
    for number in numbers:
        arguments.real(number, name, above=0, what="a positive number for each replica")
    return shares


def weights_of(shares: Any, replicas: int, local: int) -> list[int]:
    """Return a whole number for each rank, in proportion to the rows that it takes.

    Args:
        shares: the argument of ``ScaleStrategy``.
        replicas: number of replicas of all workers.
        local: number of replicas of each worker.

    Example:
        >>> weights_of([3, 1], replicas=2, local=1)
        [3, 1]
        >>> weights_of({"worker:1": 0.5}, replicas=4, local=2)
        [65536, 65536, 32768, 32768]
    """
    numbers = [1.0] * replicas
    if isinstance(shares, Mapping):
        for key, number in shares.items():
            kind, place = key.split(":")
            count, size = (replicas // local, local) if kind == "worker" else (replicas, 1)
            if int(place) >= count:
                raise ValueError(
                    f"shares={shares!r} names {key}, and the {kind}s have the numbers 0 to "
                    f"{count - 1}. Name one of these, or leave it out"
                )
            first = int(place) * size
            numbers[first : first + size] = [float(number)] * size
    elif shares != MEASURED:
        if len(shares) != replicas:
            raise ValueError(
                f"shares={shares!r} has {len(shares)} numbers, and there are {replicas} replicas. "
                "Give one number for each replica, or name workers, as in {'worker:1': 0.5}"
            )
        numbers = [float(number) for number in shares]
    return weights_for(numbers)


def weights_for(numbers: Sequence[float]) -> list[int]:
    """Return whole numbers in proportion to positive numbers, at most ``UNIT``."""
    most = max(numbers)
    if most <= UNIT and all(number == int(number) for number in numbers):
        return [int(number) for number in numbers]
    return [max(1, math.floor(UNIT * (number / most) + 0.5)) for number in numbers]


def ends(weights: Any, rows: Any, of: Any = np) -> Any:
    """Return where each part of a batch ends.

    Each part has at least one row, if there are enough; the others are shared out in proportion to
    what each part lacks. If no part is smaller than one row, its rows are the exact proportion,
    rounded by less than one row. The numbers are whole, so all machines find the same ends.

    Args:
        weights: a whole number for each part, as int64.
        rows: number of rows of the batch, as int64.
        of: module whose functions to use: ``numpy`` or ``tensorflow``.

    Example:
        >>> ends(np.array([3, 1]), np.int64(64)), ends(np.array([3, 1]), np.int64(1))
        (array([48, 64]), array([1, 1]))
        >>> ends(np.array([100, 1, 1]), np.int64(8))
        array([6, 7, 8])
    """
    count = weights.shape[0]
    total = of.cumsum(weights)[-1]
    lacking = of.cumsum(of.maximum(rows * weights - total, 0))
    least, whole = of.cumsum(of.ones_like(weights)), of.maximum(lacking[-1], 1)
    spare = of.maximum(rows - count, 0)
    return of.minimum(least + (lacking * spare + whole // 2) // whole, rows)


def in_order_of_outputs(ranks: Iterable[int], local: int) -> list[int]:
    """Return ranks in the order in which Keras joins what they predict.

    These are all first replicas of workers, then all second ones, and so on.

    Args:
        ranks: the ranks.
        local: number of replicas of each worker.
    """
    return sorted(ranks, key=lambda rank: (rank % local, rank))


class Shares:
    """The shares of a strategy, which the feed follows in each step.

    Args:
        given: the argument ``shares``.
        replicas: number of replicas of all workers.
        devices: devices of this worker's replicas.
        worker: index of this worker.

    Attributes:
        weights: whole numbers in proportion to the rows of each rank, in a variable that steps may
            change.
        places: for each rank, which part of a batch it takes.
    """

    def __init__(self, given: Any, replicas: int, devices: Sequence[str], worker: int) -> None:
        self._given, self._first = given, worker * len(devices)
        made = weights_of(given, replicas, len(devices))
        with tf.init_scope(), tf.device(host_of(devices[0])):
            self.weights = tf.Variable(made, trainable=False, dtype=tf.int64, name="shares")
        self._order = in_order_of_outputs(range(replicas), len(devices))
        self.places = [self._order.index(rank) for rank in range(replicas)]

    @property
    def is_measured(self) -> bool:
        """Whether steps are measured to find the shares."""
        return isinstance(self._given, str)

    def now(self) -> list[float]:
        """Return which part of the rows each rank takes; their sum is 1."""
        weights = self.weights.numpy()
        return [float(weight / weights.sum()) for weight in weights]

    def words(self, changes: Sequence[Any] | None) -> str:
        """Return in words which part of a batch each replica takes, and why.

        Args:
            changes: changes of measured shares, as far as this process knows; None if the shares
                are fixed.
        """
        now = ", ".join(f"{share:.1%}" for share in self.now())
        if changes is None:
            return f"The replicas take {now} of the rows of each batch, as shares say"
        why = f": {changes[-1]}" if changes else ""
        return f"The replicas take {now} of the rows of each batch, as measured{why}"

    def rows_of_ranks(self, weights: np.ndarray, rows: int) -> np.ndarray:
        """Return how many of a batch's rows each rank takes with some weights."""
        parts: np.ndarray = np.diff(ends(weights[self._order], np.int64(rows)), prepend=0)
        return np.take(parts, self.places)

    def check(self, dataset: tf.data.Dataset, workers: int) -> None:
        """Raise if a dataset cannot be cut by shares."""
        for spec in tf.nest.flatten(dataset.element_spec):
            if is_batch(spec) and spec.shape.rank == 0:
                raise ValueError(_NOT_BATCHED.format(self._given, spec))
        policy = dataset.options().experimental_distribute.auto_shard_policy
        of_each = tf.data.experimental.AutoShardPolicy
        if workers > 1 and policy not in (of_each.AUTO, of_each.DATA):
            raise ValueError(_OWN_ROWS.format(self._given, policy.name))

    def part(self, batch: Any, replica: int) -> Any:
        """Return the rows of a global batch that a replica of this worker takes.

        Args:
            batch: structure of dense, sparse and ragged tensors.
            replica: number of the replica in this process.
        """
        weights = tf.gather(self.weights.read_value(), self._order)
        place = self.places[self._first + replica]

        def rows(x: Any) -> Any:
            if not is_batch(x):
                return x
            until = ends(weights, number_of_rows(x), tf)
            begin = until[place - 1] if place else tf.zeros([], tf.int64)
            return rows_between(x, begin, until[place])

        return tf.nest.map_structure(rows, batch)
