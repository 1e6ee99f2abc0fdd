"""What the engine, its log and its errors call what is sent together."""

from __future__ import annotations

from typing import NamedTuple


class BucketId(NamedTuple):
    """A bucket: the numbers that share a collective.

    ``str(bucket)`` is its name in errors.

    Args:
        label: what it holds.
        owner: the optimizer whose gradients these are; empty for all else that ranks exchange.
        graph: the function in which it was traced; empty for eager ops.
        number: which one of this label and owner in the graph, from 1; 0 for eager ops.

    Example:
        >>> print(BucketId("gradients 0: dense/kernel", "adam", "train_step", 1))
        train_step/adam gradients 0: dense/kernel_1
    """

    label: str
    owner: str = ""
    graph: str = ""
    number: int = 0

    def __str__(self) -> str:
        # As in custom_ops/engine/bucket.h.
        graph = f"{self.graph}/" if self.graph else ""
        owner = f"{self.owner} " if self.owner else ""
        number = f"_{self.number}" if self.number else ""
        return f"{graph}{owner}{self.label}{number}"

    @property
    def untraced(self) -> BucketId:
        """The same without where it was traced."""
        return BucketId(self.label, self.owner)


Name = str | BucketId  # a string is the label of what no optimizer owns


def bucket_id(name: Name) -> BucketId:
    """The identity of a bucket of that name; one that is an identity already is returned."""
    return BucketId(name) if isinstance(name, str) else name
