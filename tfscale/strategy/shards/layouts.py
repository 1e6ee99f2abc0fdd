"""The table that ``strategy.layouts()`` returns: who holds which numbers of weights and slots."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfscale.bridge.objects import key_of, native, path_of, trained_by
from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.parallel.layout import Copy, Flat, Layout, Repeated
from tfscale.parallel.table import Held, Table
from tfscale.strategy.placed import OwnedCopy, Placed
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.shards.rounded import Rounded
from tfscale.strategy.shards.sharding import Sharding, is_wrapper


def layouts(strategy: Strategy) -> Table:
    """Return who holds which numbers of the weights and slots of all optimizers that are built."""
    ranks = strategy.extended.number_of_replicas
    rows: list[Held] = []
    for optimizer in sorted(strategy.optimizers, key=lambda each: str(each.name)):
        if optimizer.built and not is_wrapper(optimizer):
            rows += _rows(strategy.sharding, optimizer, ranks)
    return Table(rows, ranks, strategy.parts.notes())


def _rows(sharding: Sharding | None, optimizer: Optimizer, ranks: int) -> Iterator[Held]:
    parts = None if sharding is None else sharding.of(optimizer)
    slots = _slots(optimizer) if parts is None else parts.slots(optimizer)
    for weight, own in zip(trained_by(optimizer), slots, strict=True):
        shape, size = tuple(weight.shape), tf.as_dtype(weight.dtype).size
        layouts = [(_layout_of(v, ranks), tf.as_dtype(v.dtype).size) for v in own]
        held = _layout_of(weight, ranks)
        why = _why_unsharded(held) if parts is None else parts.why
        if isinstance(native(weight), Rounded):
            why += "; the weight is rounded, and its exact value is in parts, too"
        yield Held(path_of(weight), shape, (held, size), tuple(layouts), why)


def _layout_of(variable: Variable, ranks: int) -> Layout:
    own = native(variable)
    has_parts = isinstance(own, Placed) and not isinstance(own, OwnedCopy)
    return own.layout if has_parts else Copy(tuple(variable.shape), ranks)


def _why_unsharded(layout: Layout) -> str:
    if isinstance(layout, Copy):
        return "replicas hold copies"
    if layout.holder is not None:
        return "one stage has the weight"
    shared = isinstance(layout, Repeated) and isinstance(layout.inner, Flat)
    return "weights are shared out" if shared else "a rule cuts the weight"


def _slots(optimizer: Optimizer) -> list[list[Variable]]:
    """Return the slots of each weight: what the optimizer has made beside it."""
    slots: dict[str, list[Variable]] = {key_of(weight): [] for weight in trained_by(optimizer)}
    for variable in optimizer.variables:
        slots.get(getattr(native(variable), "beside", ""), []).append(variable)
    return list(slots.values())
