"""The number of samples of each step in the running ``fit``, found without reading data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tfscale.bridge import fit

Size = int | Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of an epoch.

    size: samples of a global batch, or a function from a step's number to them; None if unknown.
    count: number of batches; None if unknown.
    last: samples of the last batch.
    """

    size: Size | None
    count: int | None
    last: int | None

    def samples(self, batch: int, step: int, steps: int) -> int | None:
        """Return the number of samples of ``steps`` steps, from ``batch`` of the epoch on.

        ``step`` is the number of the first step over all epochs.
        """
        if self.size is None:
            return None
        if callable(self.size):
            return sum(self.size(step + more) for more in range(steps))
        if self.last is not None and batch + steps == self.count:
            return self.size * (steps - 1) + self.last
        return self.size * steps

    def steps(self, batch: int, at_most: int) -> int:
        """Return the number of steps of an execution that begins at a batch."""
        return at_most if self.count is None else max(1, min(at_most, self.count - batch))


def batches_of_fit(params: Mapping[str, Any], given: Size | None) -> Batches:
    """Return the batches of the running ``fit``, for a callback.

    Args:
        params: the parameters that Keras gives callbacks.
        given: the batch size that the user gave.
    """
    count = params.get("steps")
    iterator = fit.iterator()
    if iterator is None:  # a user's own loop calls the callbacks
        return Batches(given, count, None)
    adapter = iterator.data_adapter
    whole = count is not None and count == adapter.num_batches
    last = _size_of_last(adapter) if whole else None
    return Batches(given or adapter.batch_size or fit.batch_size(iterator), count, last)


def _size_of_last(adapter: Any) -> int | None:
    """Return the size of a smaller last batch; None if there is none, or Keras does not know."""
    try:
        size: int | None = adapter.partial_batch_size if adapter.has_partial_batch else None
    except NotImplementedError:  # a PyDataset
        return None
    return size
