"""Every algorithm, for every number of ranks, keeps its promise at its stated cost."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings

from tests.collectives.common import all_reduces, schedules
from tests.collectives.oracle import works
from tfscale.collectives import (
    ALGORITHMS,
    Schedule,
    all_gather,
    broadcast,
    central,
    direct,
    halving,
    hierarchical,
    reduce_scatter,
    ring,
    tree,
)

NAMES = list(ALGORITHMS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", range(1, 34))
def test_verifies_at_its_stated_cost(name: str, ranks: int) -> None:
    ALGORITHMS[name](ranks).verify()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [48, 64, 97])
def test_verifies_for_more_ranks(name: str, ranks: int) -> None:
    ALGORITHMS[name](ranks).verify()


@pytest.mark.parametrize("ranks", [255, 256, 257, 1000])
def test_few_messages_verify_for_many_ranks(ranks: int) -> None:
    for algorithm in (tree, central):
        algorithm(ranks).verify()
    halving(min(ranks, 257)).verify()


@given(schedules())
@settings(max_examples=150)
def test_anything_we_make_verifies(schedule: Schedule) -> None:
    schedule.verify()


@given(all_reduces(most=9))
@settings(max_examples=60)
def test_a_naive_run_agrees(schedule: Schedule) -> None:
    assert works(schedule)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_sends_nothing(name: str) -> None:
    schedule = ALGORITHMS[name](1)
    count = schedule.verify()
    assert (count.rounds, count.messages, count.sent) == (0, 0, 0)
    assert [move.kind.name for move in schedule.program(0)] == ["FINALISE"] * schedule.chunks


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16, 31])
def test_costs_are_the_textbook_ones(ranks: int) -> None:
    best = Fraction(2 * (ranks - 1), ranks)
    assert ring(ranks).verify().rounds == 2 * (ranks - 1)
    assert ring(ranks).verify().sent == best
    assert direct(ranks).verify().rounds == 2
    assert direct(ranks).verify().sent == best
    assert central(ranks).verify().rounds == 2
    assert central(ranks).verify().received == ranks - 1
    log = ranks.bit_length() - 1
    assert tree(ranks).verify().rounds == 2 * log
    assert tree(ranks).verify().sent <= 2
    extra = ranks & (ranks - 1) != 0
    assert halving(ranks).verify().rounds == 2 * log + 2 * extra
    if not extra:
        assert halving(ranks).verify().sent == best
        assert halving(ranks).verify().messages == 2 * log * ranks


@pytest.mark.parametrize("ranks", range(2, 34))
def test_no_rank_is_an_inner_node_of_both_trees(ranks: int) -> None:
    for rank in range(ranks):
        adds = {move.first for move in tree(ranks).program(rank) if move.kind.name == "ADD"}
        assert len(adds) <= 1


@pytest.mark.parametrize("outer", NAMES)
@pytest.mark.parametrize(
    "sizes", [[1], [5], [1, 1, 1], [4, 4], [3, 4, 5], [1, 6], [6, 1, 2], [2] * 7, [8, 8, 8, 3]]
)
def test_hierarchies_of_any_groups(sizes: list[int], outer: str) -> None:
    schedule = hierarchical(sizes, ALGORITHMS[outer])
    assert schedule.ranks == sum(sizes)
    schedule.verify()
    assert schedule.cost is not None
    even = len(set(sizes)) == 1 and ALGORITHMS[outer](len(sizes)).cost.exact
    assert schedule.cost.exact == even


def test_hierarchies_nest() -> None:
    schedule = hierarchical([4] * 6, lambda groups: hierarchical([3] * (groups // 3), halving))
    schedule.verify()
    assert schedule.name == "hierarchical(6x4, hierarchical(2x3, halving))"


def test_outer_traffic_is_divided_by_the_group() -> None:
    sizes = [4, 4, 4]
    schedule = hierarchical(sizes)
    outside = [
        sum(move.last - move.first for move in schedule.program(rank) if _leaves(move, rank))
        for rank in range(12)
    ]
    assert {Fraction(chunks, schedule.chunks) for chunks in outside} == {ring(3).cost.sent / 4}


def _leaves(move, rank: int) -> bool:
    return move.kind.name == "SEND" and move.peer // 4 != rank // 4


def test_default_groups_are_near_the_square_root() -> None:
    assert hierarchical(64).name == "hierarchical(8x8, ring)"
    assert hierarchical(12).name == "hierarchical(3x4, ring)"
    assert hierarchical(13).name == "hierarchical(5+2x4, ring)"


@pytest.mark.parametrize("groups", [[], [0], [3, 0], 0, -2])
def test_hierarchies_refuse_empty_groups(groups) -> None:
    with pytest.raises(ValueError, match=r"groups.* ranks.*; got (\[\]|0|-2)"):
        hierarchical(groups)


@pytest.mark.parametrize("ranks", [0, -1])
@pytest.mark.parametrize("name", NAMES)
def test_no_ranks_are_refused(name: str, ranks: int) -> None:
    with pytest.raises(ValueError, match="a number of ranks, .*1 (or more|to)"):
        ALGORITHMS[name](ranks)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("half", [reduce_scatter, all_gather])
@pytest.mark.parametrize("whole", [ring, direct])
def test_halves(whole, half, ranks: int) -> None:
    count = half(whole(ranks)).verify()
    assert count.sent == Fraction(ranks - 1, ranks)


@pytest.mark.parametrize("half", [reduce_scatter, all_gather])
def test_halves_refuse_others_and_say_who_qualifies(half) -> None:
    for unfit in (tree(2), tree(8), central(3), halving(6), hierarchical([4, 4])):
        with pytest.raises(ValueError, match="ring, direct, and halving with a power of two"):
            half(unfit)
    with pytest.raises(ValueError, match="expected an all-reduce"):
        half(half(ring(4)))


@pytest.mark.parametrize("root", [-1, 4])
def test_broadcast_refuses_a_root_outside(root: int) -> None:
    with pytest.raises(ValueError, match="root is one of the 4 ranks.*; got"):
        broadcast(4, root)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16, 300])
def test_broadcast_is_shallow(ranks: int) -> None:
    count = broadcast(ranks, root=ranks - 1).verify()
    assert count.rounds == ranks.bit_length() - 1
    assert count.messages == ranks - 1
