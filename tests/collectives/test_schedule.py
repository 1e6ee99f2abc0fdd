"""A schedule is data: lazy, comparable, printable."""

from __future__ import annotations

import dataclasses

import pytest

from tests.collectives.common import calls
from tfscale.collectives import (
    ALGORITHMS,
    Schedule,
    add,
    finalise,
    halving,
    hierarchical,
    keep,
    resolve,
    ring,
    send,
    tree,
)


def test_a_program_is_made_for_one_rank_alone() -> None:
    asked: list[int] = []
    whole = ring(100_000)

    def build(rank: int):
        asked.append(rank)
        return whole.build(rank)

    program = dataclasses.replace(whole, build=build).program(5)
    assert asked == [5]
    assert len(program) == 4 * (100_000 - 1) + 1


@pytest.mark.parametrize("name", ["tree", "halving", "hierarchical", "central"])
def test_making_a_huge_schedule_is_cheap(name: str) -> None:
    """Less than one call for each rank."""
    assert calls(lambda: ALGORITHMS[name](100_000).program(99_999)) < 100_000
    assert len(ALGORITHMS[name](100_000).program(99_999)) > 0


def test_steps_take_one_chunk_or_consecutive_ones() -> None:
    assert send(3, 2) == send(3, range(2, 3)) == (0, 3, 2, 3)
    assert add(1, range(4)) == (1, 1, 0, 4)
    assert finalise(0) == (2, -1, 0, 1)
    assert keep(0, range(2, 4)) == (3, 0, 2, 4)
    for wrong in (range(0), range(0, 4, 2), range(3, 0, -1)):
        with pytest.raises(ValueError, match="consecutive"):
            send(0, wrong)


def test_steps_print_like_sentences() -> None:
    assert str(send(3, 2)) == "send 2 to rank 3"
    assert str(keep(1, range(4))) == "keep 0..3 from rank 1"
    assert str(finalise(7)) == "finalise 7"


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is one of the 4 ranks of ring, from 0 to 3; got 4"):
        ring(4).program(4)


def test_fingerprints_tell_schedules_apart() -> None:
    all_of_them = [
        ring(4),
        ring(5),
        tree(4),
        halving(4),
        hierarchical([2, 2]),
        ring(100),
        ring(101),
    ]
    all_of_them += [hierarchical([2, 2], tree), hierarchical([1, 3]), hierarchical([3, 1])]
    prints = [schedule.fingerprint() for schedule in all_of_them]
    assert len(set(prints)) == len(prints)
    assert prints == [schedule.fingerprint() for schedule in all_of_them]
    assert max(map(len, prints)) < 100
    assert ring(4).fingerprint() == "ring/4/4/43befb985ae399dc"


def test_fingerprint_sees_every_step() -> None:
    mine = Schedule("ring", 4, 4, lambda rank: list(ring(4).build(rank))[::-1])
    assert mine.fingerprint() != ring(4).fingerprint()


def test_resolve() -> None:
    assert resolve("tree", 6).name == "tree"
    assert resolve(halving, 6).ranks == 6
    mine = ring(3)
    proven = resolve(mine, 3)
    assert proven.fingerprint() == mine.fingerprint()
    assert resolve(proven, 3) is proven
    with pytest.raises(ValueError, match="'ring', 'tree', 'halving'.*Did you mean 'ring'"):
        resolve("rnig", 3)
    with pytest.raises(ValueError, match="algorithm is 'ring', .*got 'zzz'"):
        resolve("zzz", 3)
    with pytest.raises(ValueError, match="ring is for 3 ranks, but 4 take part"):
        resolve(mine, 4)
    with pytest.raises(ValueError, match="got 17"):
        resolve(17, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must return a Schedule"):
        resolve(lambda ranks: ranks, 4)  # type: ignore[arg-type,return-value]
