"""Helpers of the tests of schedules."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hypothesis import strategies as st

from tfscale.collectives import (
    ALGORITHMS,
    Schedule,
    all_gather,
    broadcast,
    direct,
    halving,
    hierarchical,
    reduce_scatter,
    ring,
)

POWERS_OF_TWO = (1, 2, 4, 8, 16, 32)


def calls(act: Callable[[], object]) -> int:
    """Count the functions that ``act`` calls: work, measured alike on every machine."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


@st.composite
def all_reduces(draw, most: int = 33) -> Schedule:
    """Any all-reduce that the library makes, for 1 to ``most`` ranks."""
    name = draw(st.sampled_from([*ALGORITHMS, "groups"]))
    if name != "groups":
        return ALGORITHMS[name](draw(st.integers(1, most)))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=min(6, max(1, most // 3))))
    return hierarchical(sizes, ALGORITHMS[draw(st.sampled_from(list(ALGORITHMS)))])


@st.composite
def schedules(draw, most: int = 33) -> Schedule:
    """Any schedule that the library makes."""
    kind = draw(st.sampled_from(["all_reduce"] * 3 + ["half", "broadcast"]))
    if kind == "all_reduce":
        return draw(all_reduces(most))
    if kind == "broadcast":
        ranks = draw(st.integers(1, most))
        return broadcast(ranks, draw(st.integers(0, ranks - 1)))
    whole = draw(st.sampled_from([ring, direct, halving]))
    fitting = [p for p in POWERS_OF_TWO if p <= most]
    ranks = draw(st.sampled_from(fitting) if whole is halving else st.integers(1, most))
    return draw(st.sampled_from([reduce_scatter, all_gather]))(whole(ranks))
