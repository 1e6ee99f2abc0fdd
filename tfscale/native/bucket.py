"""Names of buckets in the engine, its log and its errors."""

from __future__ import annotations

from typing import NamedTuple


class BucketId(NamedTuple):
    """Identity of a bucket: of numbers that share a collective.

    ``str(bucket)`` is its name in errors.

    Args:
        label: content of the bucket.
        owner: name of the optimizer whose gradients these are; empty for other content.
        graph: name of the function in which the bucket was traced; empty for eager ops.
        number: number of the bucket among those of its label and owner in the graph, from 1; 0 for
            eager ops.

    Example:
        >>> print(BucketId("gradients 0: dense/kernel", "adam", "train_step", 1))
        train_step/adam gradients 0: dense/kernel_1
    """

    label: str
    owner: str = ""
    graph: str = ""
    number: int = 0

    def __str__(self) -> str:
        # Keep it equal to custom_ops/engine/bucket.h.
        graph = f"{self.graph}/" if self.graph else ""
        owner = f"{self.owner} " if self.owner else ""
        number = f"_{self.number}" if self.number else ""
        return f"{graph}{owner}{self.label}{number}"

    @property
    def untraced(self) -> BucketId:
        """Identity without graph and number."""
        return BucketId(self.label, self.owner)


Name = str | BucketId  # a string is the label of a bucket without an owner


def bucket_id(name: Name) -> BucketId:
    """Return the identity of a bucket by its name; return an identity unchanged."""
    return BucketId(name) if isinstance(name, str) else name
