"""A model's weights, dealt out to fragments."""

from __future__ import annotations

from collections.abc import Sequence


def dealt(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Which weights are in which fragment.

    The largest first, each goes to the fragment that has the fewest bytes by then. So layers of
    one size are dealt out in turn, which the paper calls strided.

    Args:
        sizes: bytes of each weight.
        fragments: how many there are.

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
    filled = [(0, 0)] * fragments  # bytes and weights: weights without numbers count, too
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = min(range(fragments), key=lambda fragment: filled[fragment])
        parts[least].append(place)
        filled[least] = (filled[least][0] + sizes[place], filled[least][1] + 1)
    return [sorted(part) for part in parts]
