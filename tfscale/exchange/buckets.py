"""Gradients that are sent together.

A collective costs a fixed time, whatever it carries, so small gradients share one.
The last layer's gradient is ready first: buckets are filled from the end, and the
first of them are sent while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfscale.compression.gradient import Gradient
from tfscale.compression.method import Method
from tfscale.compression.policy import MethodPolicy

# Enough to be worth a collective, and soon full.
FIRST_BYTES = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Gradients of one type that one method sums together."""

    name: str
    method: Method
    dtype: str
    # Positions in the list of gradients, in the order in which they lie in the bucket.
    members: tuple[int, ...]


def pack(
    gradients: Sequence[Gradient],
    policy: MethodPolicy,
    bucket_bytes: int,
    first_bytes: int = FIRST_BYTES,
    what: str = "gradients",
) -> tuple[Bucket, ...]:
    """Put every gradient in a bucket.

    The same gradients, policy and sizes give the same buckets on every worker.

    Args:
        gradients: in the order of their variables, the first layer's first.
        policy: says by which method each is summed.
        bucket_bytes: what a bucket may hold, in memory. A larger gradient is a bucket
            of its own.
        first_bytes: the same for the first bucket of each method and type, if that is
            less: a small one is on its way sooner.
        what: they are called, in names of buckets.

    Returns:
        The buckets in the order in which they get complete.

    Example:
        >>> layers = [Gradient(f"dense_{i}/kernel", (256, 256), "float32") for i in range(4)]
        >>> for bucket in pack(layers, MethodPolicy("int8"), 1 << 19, first_bytes=1 << 18):
        ...     print(bucket.name, bucket.method, bucket.members)
        gradients 0: dense_3/kernel int8 (3,)
        gradients 1: dense_2/kernel..dense_1/kernel int8 (2, 1)
        gradients 2: dense_0/kernel int8 (0,)
    """
    for size, limit in (("bucket_bytes", bucket_bytes), ("first_bytes", first_bytes)):
        if limit < 1:
            raise ValueError(f"{size} is a number of bytes, 1 or more; got {limit}")
    first = min(first_bytes, bucket_bytes)
    filled = [
        (kind, members)
        for kind, positions in _by_kind(gradients, policy).items()
        for members in _cut(positions, gradients, first, bucket_bytes)
    ]
    # The gradient that is ready last completes its bucket.
    filled.sort(key=lambda bucket: bucket[1][-1], reverse=True)
    return tuple(
        Bucket(_name(f"{what} {number}", members, gradients), method, dtype, members)
        for number, ((method, dtype), members) in enumerate(filled)
    )


def _by_kind(
    gradients: Sequence[Gradient], policy: MethodPolicy
) -> dict[tuple[Method, str], list[int]]:
    """Positions by method and type, each in the order in which the gradients get ready."""
    kinds: dict[tuple[Method, str], list[int]] = {}
    for position in reversed(range(len(gradients))):
        one = gradients[position]
        kinds.setdefault((policy.method_of(one), one.dtype), []).append(position)
    return kinds


def _cut(
    positions: Sequence[int], gradients: Sequence[Gradient], first: int, others: int
) -> Iterator[tuple[int, ...]]:
    """Runs of positions, each as long as its bytes allow."""
    members: list[int] = []
    used, limit = 0, first
    for position in positions:
        size = gradients[position].bytes
        if members and used + size > limit:
            yield tuple(members)
            members, used, limit = [], 0, others
        members.append(position)
        used += size
    yield tuple(members)


def _name(numbered: str, members: tuple[int, ...], gradients: Sequence[Gradient]) -> str:
    """Unique by its number, readable by the variables at its ends."""
    ends = [_short(gradients[members[0]].path), _short(gradients[members[-1]].path)]
    return f"{numbered}: {'..'.join(ends[: len(members)])}"


def _short(path: str) -> str:
    """The layer and the variable."""
    return "/".join(path.split("/")[-2:])
