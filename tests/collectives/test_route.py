"""Routes are proven, priced and drawn as all schedules are."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction

import pytest

from tfscale.collectives import (
    Cluster,
    Kind,
    Link,
    Move,
    Schedule,
    ScheduleError,
    add,
    all_to_all,
    finalise,
    keep,
    ring,
    send,
    simulate,
    transfer,
)
from tfscale.collectives.route import places

LINK = Link(Fraction(3), Fraction(1, 7))
NBYTES = Fraction(1000)
RANKS = [*range(1, 13), 32]


def made_of(*programs, route, chunks: int = 1) -> Schedule:
    def build(rank: int):
        return programs[rank]

    return Schedule("mine", len(programs), chunks, build, goal="route", route=route)


def to_last(chunk: int) -> tuple[int, int]:
    return 0, 2


@pytest.mark.parametrize("ranks", RANKS)
def test_an_all_to_all_is_right_and_costs_what_it_says(ranks: int) -> None:
    schedule = all_to_all(ranks)
    count = schedule.verify()
    assert count.messages == ranks * (ranks - 1)
    assert count.sent == count.received == Fraction(ranks - 1, ranks**2)
    for link in (LINK, Link(Fraction(0), Fraction(1)), Link(Fraction(1), Fraction(0))):
        assert simulate(schedule, NBYTES, link).seconds == schedule.cost.time(NBYTES, link)


def test_a_symmetric_all_to_all_is_simulated_as_one_that_is_not_declared_so() -> None:
    cluster = Cluster([2, 2, 2], Link(1, Fraction(1, 9)), Link(4, Fraction(1, 3)))
    for machine in (LINK, cluster):
        schedule = all_to_all(6)
        one, all_ = (
            simulate(s, NBYTES, machine, messages=all_ranks)
            for s, all_ranks in ((schedule, False), (schedule, True))
        )
        assert one.seconds == all_.seconds
        assert [*one.sent] == [*all_.sent]


@pytest.mark.parametrize(
    ("ranks", "source", "target"), [(2, 0, 1), (2, 1, 0), (5, 3, 1), (64, 0, 63)]
)
def test_a_transfer_is_right_and_costs_what_it_says(ranks: int, source: int, target: int) -> None:
    schedule = transfer(ranks, source, target)
    count = schedule.verify()
    assert (count.rounds, count.messages, count.sent) == (1, 1, 1)
    seen = simulate(schedule, NBYTES, LINK)
    assert seen.seconds == schedule.cost.time(NBYTES, LINK) == LINK.seconds(NBYTES)
    assert [rank for rank in range(ranks) if schedule.program(rank)] == sorted([source, target])
    assert sum(seen.sent) == seen.sent[source] == NBYTES


def test_a_transfer_of_a_rank_to_itself_sends_nothing() -> None:
    schedule = transfer(3, 1, 1)
    assert schedule.verify().messages == 0
    assert simulate(schedule, NBYTES, LINK).seconds == schedule.cost.time(NBYTES, LINK) == 0
    assert places(schedule, 1) == ((0,), (0,))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_places_are_ordered_by_target_and_by_source(ranks: int) -> None:
    schedule = all_to_all(ranks)
    for rank in range(ranks):
        brings, gets = places(schedule, rank)
        everyone = range(ranks)
        assert [schedule.route(chunk) for chunk in brings] == [(rank, other) for other in everyone]
        assert [schedule.route(chunk) for chunk in gets] == [(other, rank) for other in everyone]
    assert places(transfer(3, 2, 0), 2) == ((0,), ())
    assert places(transfer(3, 2, 0), 0) == ((), (0,))
    assert places(transfer(3, 2, 0), 1) == ((), ())


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([[finalise(0), send(2, 0)], [], []], "chunk 0: expected rank 2 to keep it, its target"),
        ([[finalise(0)], [], []], "chunk 0: expected rank 2 to keep it, its target"),
        ([[], [], []], "chunk 0: expected rank 0 to finalise it, its source"),
        ([[], [finalise(0), send(2, 0)], [keep(1, 0)]], "expected only rank 0, the source"),
        ([[finalise(0), send(1, 0)], [keep(0, 0)], []], "expected only rank 2, the target"),
        ([[finalise(0), send(2, 0)], [], [keep(0, 0), keep(0, 0)]], "but it is 'final'"),
        ([[finalise(0), send(2, 0), send(2, 0)], [], [keep(0, 0)]], "different from all others"),
        ([[send(2, 0), finalise(0)], [], [keep(0, 0)]], "expected chunk 0 to be 'final'"),
        ([[finalise(0), send(2, 0)], [], [add(0, 0)]], "no such move in a schedule whose goal is"),
        ([[finalise(0)], [], [keep(0, 0)]], "expected rank 0 to send.*wait forever"),
    ],
)
def test_mistakes_are_named(programs, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        made_of(*programs, route=to_last).verify()


def test_two_may_send_to_each_other_at_once() -> None:
    """A message waits for nothing but its source, so no order of moves is a deadlock."""
    programs = [[finalise(0), keep(1, 1), send(1, 0)], [finalise(1), keep(0, 0), send(0, 1)]]
    schedule = made_of(*programs, route=lambda chunk: (chunk, 1 - chunk), chunks=2)
    assert schedule.verify().messages == 2


def arrives(schedule: Schedule) -> bool:
    """A second, naive opinion: follow each chunk from its source to its target."""
    programs = [list(schedule.build(rank)) for rank in range(schedule.ranks)]
    for chunk in range(schedule.chunks):
        source, target = schedule.route(chunk)
        moves = [
            (rank, move.kind, -1 if move.kind is Kind.FINALISE else move.peer)
            for rank, program in enumerate(programs)
            for move in program
            if move.first <= chunk < move.last
        ]
        right = [(source, Kind.FINALISE, -1)]
        if source != target:
            right += [(source, Kind.SEND, target), (target, Kind.KEEP, source)]
        if sorted(moves, key=str) != sorted(right, key=str):
            return False
        own = [kind for rank, kind, _ in moves if rank == source]
        if own[0] is not Kind.FINALISE:
            return False
    return True


def changed(schedule: Schedule, dice: random.Random) -> Schedule:
    programs = [list(schedule.program(rank)) for rank in range(schedule.ranks)]
    program = dice.choice([p for p in programs if p])
    at = dice.randrange(len(program))
    move = program[at]
    kind = dice.randrange(4)
    if kind == 0:
        del program[at]
    elif kind == 1:
        program.append(program.pop(at))
    elif kind == 2:
        program[at] = Move(move.kind, dice.randrange(schedule.ranks), move.first, move.last)
    else:
        other = dice.randrange(schedule.chunks)
        program[at] = Move(move.kind, move.peer, other, other + 1)
    return dataclasses.replace(
        schedule, build=lambda rank: programs[rank], symmetric=False, cost=None
    )


@pytest.mark.parametrize("seed", range(4))
def test_any_change_is_seen_as_a_second_opinion_sees_it(seed: int) -> None:
    dice, found = random.Random(seed), []
    for _ in range(150):
        base = all_to_all(dice.randint(2, 5)) if dice.random() < 0.8 else transfer(3, 0, 2)
        schedule = changed(base, dice)
        try:
            schedule.verify()
            found.append(True)
        except ScheduleError:
            found.append(False)
        assert found[-1] == arrives(schedule)
    assert any(found) and not all(found)


@pytest.mark.parametrize("schedule", [all_to_all(5), transfer(4, 1, 3)], ids=lambda s: s.name)
def test_they_can_be_drawn(schedule: Schedule) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = schedule.draw().axes
    assert len(axes.texts) == schedule.verify().messages


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="target is one of the 3 ranks, from 0 to 2; got 3"):
        transfer(3, 0, 3)
    with pytest.raises(ValueError, match="ranks is a number of ranks"):
        all_to_all(0)
    with pytest.raises(ValueError, match="route is a function from a chunk"):
        Schedule("mine", 2, 1, lambda rank: [], goal="route")
    with pytest.raises(ValueError, match="route is None, as the goal is all_reduce"):
        dataclasses.replace(ring(3), route=to_last)
