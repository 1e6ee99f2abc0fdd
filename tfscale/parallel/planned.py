"""Arithmetic of a training's memory on each rank: shapes, types and layouts, added up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import native
from tfscale.bridge.tensorflow import DistributedValues
from tfscale.compression.gradient import Gradient
from tfscale.compression.policy import MethodPolicy, policy_of
from tfscale.parallel import deal
from tfscale.parallel.layout import Copy, Layout
from tfscale.support import arguments
from tfscale.support.sizes import in_words, number_of_bytes
from tfscale.support.text import wrapped

SHARDS = ("optimizer", "all")

# Numbers of arrays that are whole at one moment. Three gradients are: one is computed, and two are
# sent. With shard="all" two weights are, too; with shard="optimizer" replicas send two
# buckets of new weights, which are there before and after they are packed.
_GRADIENTS, _WEIGHTS, _PACKED = 3, 2, 4
_BUCKET = 16 << 20  # bytes; a larger weight is a bucket by itself


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that a training keeps.

    Args:
        shape: its shape.
        dtype: name of its type.
    """

    shape: tuple[int, ...]
    dtype: str

    def bytes(self, shape: tuple[int, ...] | None = None) -> int:
        """Return the bytes of the array, or of a part of that shape."""
        return math.prod(self.shape if shape is None else shape) * int(tf.as_dtype(self.dtype).size)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight that an optimizer updates.

    Args:
        path: path of the variable, such as ``"dense/kernel"``.
        array: its shape and type, which are those of its gradient.
        slots: the arrays that the optimizer keeps for the weight.
    """

    path: str
    array: Array
    slots: tuple[Array, ...] = ()

    def residuals(self, policy: MethodPolicy) -> int:
        """Return the bytes that a method keeps for the weight on each rank, beside slots."""
        gradient = Gradient(self.path, self.array.shape, self.array.dtype)
        kept = policy.method_of(gradient).state(gradient)
        return sum(Array(each.shape, "float32").bytes() for each in kept.values())


@dataclasses.dataclass(frozen=True)
class Needs:
    """Needs of a training, before they are shared out.

    Args:
        weights: weights that the optimizer updates.
        others: variables that no optimizer updates, such as moving averages.
        activations: most bytes of a replica's forward and backward pass, its batch included.
        even: whether the optimizer updates each number of a weight by itself.
        optimizer: name of the optimizer.
        batch: samples of a replica in a step.
        notes: what was assumed, in sentences.
    """

    weights: tuple[Weight, ...]
    others: tuple[Array, ...] = ()
    activations: int = 0
    even: bool = False
    optimizer: str = "the optimizer"
    batch: int = 0
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank.

    Attributes:
        weights: all variables of the model, or this rank's parts of them.
        slots: the optimizer's state.
        residuals: what methods and wires keep from step to step.
        gradients: gradients of a step; updated parts of weights take their place.
        whole: weights and gradients, of those that are shared out, that are whole at one moment.
        buffers: what is sent and received, while ranks exchange gradients and weights.
        activations: what the forward and the backward pass hold, beside gradients.
    """

    weights: int
    slots: int
    residuals: int = 0
    gradients: int = 0
    whole: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def kept(self) -> int:
        """Bytes that stay from step to step."""
        return self.weights + self.slots + self.residuals

    @property
    def total(self) -> int:
        """Most bytes at one moment: activations are gone when the last gradients are exchanged."""
        return self.kept + self.gradients + self.whole + max(self.buffers, self.activations)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Planned memory of each rank; ``print`` shows it as a table.

    Attributes:
        needs: what the training needs.
        ranks: number of ranks.
        shard: what ranks share out.
        policy: wire or method of each gradient.
        most: the bytes of a rank that holds most.
        least: the bytes of a rank that holds least.
    """

    needs: Needs
    ranks: int
    shard: str | None
    policy: MethodPolicy
    most: RankBytes
    least: RankBytes

    def fits(self, limit: float | str) -> bool:
        """Return whether each rank keeps within a number of bytes, such as ``"16GB"``."""
        return self.most.total <= number_of_bytes(limit, "limit")

    def on(self, ranks: int, shard: str | None) -> Memory:
        """Return the memory of the same global batch on so many ranks.

        Activations are taken to grow with the samples of a rank.
        """
        batch = -(-self.needs.batch * self.ranks // ranks)
        share = batch / self.needs.batch if self.needs.batch else 1
        activations = math.ceil(self.needs.activations * share)
        needs = dataclasses.replace(self.needs, activations=activations, batch=batch)
        return planned(needs, ranks, shard, self.policy)

    @property
    def title(self) -> str:
        """Description of the training."""
        each = f"{self.needs.batch} samples in a step" + (" of each" if self.ranks > 1 else "")
        cut = "" if self.shard is None else f', shard="{self.shard}"'
        return f"Memory of {_ranks(self.ranks)}, {each}, {self.needs.optimizer}{cut}"

    def __str__(self) -> str:
        rows = [*_rows(self.most), ("at most", self.most.total, self._words())]
        width = max(len(name) for name, _, _ in rows)
        table = [f"  {name:<{width}}  {in_words(size):>9}  {words}" for name, size, words in rows]
        notes = [wrapped(note) for note in self.needs.notes]
        return "\n".join([self.title, *table, *notes])

    def _words(self) -> str:
        least, most = self.least.total, self.most.total
        words = "at one moment: buffers and activations take turns"
        return words if least == most else f"{words}; {in_words(least)} on the rank with least"

    __repr__ = __str__


def _rows(held: RankBytes) -> Sequence[tuple[str, int, str]]:
    every = [
        ("weights", held.weights, "all variables of the model"),
        ("slots", held.slots, "the optimizer's state"),
        ("residuals", held.residuals, "what the wire or method keeps from step to step"),
        ("gradients", held.gradients, "within a step"),
        ("whole", held.whole, "weights and gradients of the layers that compute"),
        ("buffers", held.buffers, "of exchanges, after the backward pass"),
        ("activations", held.activations, "of the forward and backward pass, before that"),
    ]
    return [row for row in every if row[1] or row[0] in ("weights", "slots", "gradients")]


def _ranks(count: int) -> str:
    return "one device" if count == 1 else f"each of {count} replicas"


# ------------------------------------------------------------------ arithmetic


def planned(
    needs: Needs, ranks: int, shard: str | None = None, policy: MethodPolicy | None = None
) -> Memory:
    """Return the memory of each rank.

    Args:
        needs: what the training needs.
        ranks: number of replicas.
        shard: None, ``"optimizer"`` or ``"all"``, as for ``ScaleStrategy``.
        policy: wire or method of each gradient; by default ``"fp32"``.

    Example:
        >>> kernel = Array((1000, 1000), "float32")
        >>> needs = Needs((Weight("dense/kernel", kernel, slots=(kernel, kernel)),), even=True)
        >>> planned(needs, ranks=4, shard="optimizer").most.slots
        2000000
    """
    arguments.whole(ranks, "ranks", 1, what="a number of replicas")
    arguments.optional(arguments.choice, shard, "shard", SHARDS)
    cut = shard if ranks > 1 else None
    layouts = _layouts(needs, ranks, cut)
    policy = policy_of(None, None, None) if policy is None else policy
    every = [_held(needs, layouts, r, cut, policy) for r in _ranks_that_differ(layouts, ranks)]
    by_total = sorted(every, key=lambda held: held.total)
    return Memory(needs, ranks, shard, policy, by_total[-1], by_total[0])


def _layouts(needs: Needs, ranks: int, shard: str | None) -> list[Layout]:
    shapes = [weight.array.shape for weight in needs.weights]
    if shard is None:
        return [Copy(shape, ranks) for shape in shapes]
    if shard == "all":
        return [deal.weight_in_parts(shape, ranks) for shape in shapes]
    return deal.dealt(shapes, ranks, needs.even)


def _ranks_that_differ(layouts: Sequence[Layout], ranks: int) -> range:
    """Return ranks that stand for all: parts have equal shapes unless weights have owners."""
    return range(ranks if any(layout.holder is not None for layout in layouts) else 1)


def _held(
    needs: Needs, layouts: Sequence[Layout], rank: int, shard: str | None, policy: MethodPolicy
) -> RankBytes:
    ranks = layouts[0].ranks if layouts else 1
    weights = [weight.array for weight in needs.weights]
    whole = sum(array.bytes() for array in weights)
    parts = [layout.part_shape(rank) for layout in layouts]
    own = sum(array.bytes(part) for array, part in zip(weights, parts, strict=True))
    cut = [array.bytes() for array, each in zip(weights, layouts, strict=True) if _is_cut(each)]
    largest = max(cut, default=0)
    bucket = min(sum(cut), max(largest, _BUCKET)) if needs.even else sum(cut)
    residuals = sum(weight.residuals(policy) for weight in needs.weights) if ranks > 1 else 0
    common = RankBytes(
        weights=whole + sum(array.bytes() for array in needs.others),
        slots=sum(
            _slot_bytes(slot, weight, layout, rank)
            for weight, layout in zip(needs.weights, layouts, strict=True)
            for slot in weight.slots
        ),
        residuals=residuals,
        gradients=own if cut else whole,
        activations=needs.activations,
    )
    if shard == "all":
        at_once = (_GRADIENTS + _WEIGHTS) * largest
        return dataclasses.replace(common, weights=common.weights - whole + own, whole=at_once)
    if cut:
        return dataclasses.replace(common, whole=_GRADIENTS * bucket, buffers=_PACKED * bucket)
    return dataclasses.replace(common, buffers=whole if ranks > 1 else 0)


def _is_cut(layout: Layout) -> bool:
    return not isinstance(layout, Copy)


def _slot_bytes(slot: Array, weight: Weight, layout: Layout, rank: int) -> int:
    """Return the bytes of a slot on a rank: laid out as its weight, or whole at the owner."""
    if slot.shape == weight.array.shape:
        return slot.bytes(layout.part_shape(rank))
    return slot.bytes() if layout.holder in (None, rank) else 0


# ------------------------------------------------------------------ variables that exist


def kept_by(variables: Iterable[Any]) -> int:
    """Return the bytes that variables take on this process's first replica.

    Example:
        >>> kept_by([keras.Variable(keras.ops.zeros([3, 5]))])
        60
    """
    every = {id(own): own for own in (_on_first_replica(v) for v in variables)}
    return sum(own.dtype.size * (own.shape.num_elements() or 0) for own in every.values())


def _on_first_replica(variable: Any) -> Any:
    own = native(variable)
    return own.values[0] if isinstance(own, DistributedValues) else own
