"""Fragments of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence


def dealt(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Return the indices of the weights in each fragment.

    The largest weight comes first. Each weight goes to the fragment that has the fewest bytes so
    far. So layers of the same size go to the fragments in turn, which the paper calls strided.

    Args:
        sizes: size of each weight, in bytes.
        fragments: number of fragments.

    Example:
        >>> dealt([4, 4, 4, 4, 1], fragments=2)
        [[0, 2, 4], [1, 3]]
    """
    if fragments > len(sizes):
        raise ValueError(
            f"fragments={fragments}, but the model has {len(sizes)} weights, of which each is in "
            f"one fragment. Take {len(sizes)} or fewer"
        )
    parts: list[list[int]] = [[] for _ in range(fragments)]
    filled = [(0, 0)] * fragments  # bytes, then weights: empty weights spread out, too
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = min(range(fragments), key=lambda fragment: filled[fragment])
        parts[least].append(place)
        filled[least] = (filled[least][0] + sizes[place], filled[least][1] + 1)
    return [sorted(part) for part in parts]
