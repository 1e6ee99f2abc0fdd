"""Buckets: gradients that are sent together.

Each collective costs a fixed time, whatever its size, so small gradients share a collective.
The last layer's gradient is ready first: buckets are filled from the end, and the first
buckets are sent while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfscale.compression.gradient import Gradient
from tfscale.compression.method import Method
from tfscale.compression.policy import MethodPolicy

# This size is large enough to be worth a collective, and small enough to be full soon.
FIRST_BYTES = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Gradients of one type that one method sums together."""

    name: str
    method: Method
    dtype: str
    # Positions in the list of gradients, in the order of the bucket.
    members: tuple[int, ...]
    rows: bool = False  # whether the bucket is one sparse gradient, which is sent as rows


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
        gradients: gradients in the order of their variables, the first layer's first.
        policy: the policy that says which method sums each gradient.
        bucket_bytes: largest size of a bucket in memory. A larger gradient gets a bucket
            of its own.
        first_bytes: largest size of the first bucket of each method and type, if that is
            less than ``bucket_bytes``: a small bucket is sent sooner.
        what: word for the gradients in the names of buckets.

    Returns:
        The buckets in the order in which they become complete.

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
            raise ValueError(f"{size} must be a number of bytes, 1 or more; got {limit}")
    first = min(first_bytes, bucket_bytes)
    filled = [
        (kind, members)
        for kind, positions in _by_kind(gradients, policy).items()
        for members in _cut(positions, gradients, first, bucket_bytes)
    ]
    # A bucket is complete when its last gradient is ready.
    filled.sort(key=lambda bucket: bucket[1][-1], reverse=True)
    return tuple(
        Bucket(_name(f"{what} {number}", members, gradients), method, dtype, members)
        for number, ((method, dtype), members) in enumerate(filled)
    )


def _by_kind(
    gradients: Sequence[Gradient], policy: MethodPolicy
) -> dict[tuple[Method, str], list[int]]:
    """Return positions by method and type, in the order in which the gradients become ready."""
    kinds: dict[tuple[Method, str], list[int]] = {}
    for position in reversed(range(len(gradients))):
        one = gradients[position]
        kinds.setdefault((policy.method_of(one), one.dtype), []).append(position)
    return kinds


def _cut(
    positions: Sequence[int], gradients: Sequence[Gradient], first: int, others: int
) -> Iterator[tuple[int, ...]]:
    """Yield runs of positions, each as long as its bytes allow."""
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
    """Return a name that is unique by its number, and shows the first and the last variable."""
    ends = [_short(gradients[members[0]].path), _short(gradients[members[-1]].path)]
    return f"{numbered}: {'..'.join(ends[: len(members)])}"


def _short(path: str) -> str:
    """Return the last two parts of a path: the layer and the variable."""
    return "/".join(path.split("/")[-2:])
