"""The verifier finds what is wrong, says where, and lets nothing pass."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from tests.collectives.common import all_reduces
from tests.collectives.oracle import works
from tfscale.collectives import (
    Cost,
    Move,
    Schedule,
    ScheduleError,
    add,
    central,
    finalise,
    keep,
    ring,
    send,
)


def made_of(*programs: Sequence[Move], chunks: int = 1, **more) -> Schedule:
    return Schedule("mine", len(programs), chunks, lambda rank: programs[rank], **more)


def refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule.verify()


OWNER = [add(1, 0), finalise(0), send(1, 0)]
GIVER = [send(0, 0), keep(0, 0)]


def test_the_smallest_schedule() -> None:
    assert made_of(OWNER, GIVER).verify().messages == 2


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([OWNER[1:], GIVER], r"rank 1, move 0 \(send 0 to rank 0\).*partial sum.*no such move"),
        ([[finalise(0)], [finalise(0)]], "one owner for chunk 0, but rank 0 finalises it too"),
        ([OWNER, [keep(0, 0)]], r"rank 1, move 0.*expected chunk 0 to be 'given away'"),
        ([OWNER, [send(0, 0)]], "rank 1: gives chunk 0 away; expected a move that keeps"),
        ([OWNER, [send(0, 0), keep(0, 0), keep(0, 0)]], r"move 2.*but it is 'final'"),
        ([OWNER, [send(0, 0), send(0, 0)]], r"rank 1, move 1.*but it is 'given away'"),
        ([[*OWNER, add(1, 0)], GIVER], r"rank 0, move 3 \(add 0 from rank 1\).*it is 'final'"),
        ([[*OWNER, send(1, 0)], GIVER], "move 3.*a message different from all others, but move 2"),
        ([OWNER[:2], GIVER], r"rank 1, move 1.*expected rank 0 to send the final bytes.*forever"),
        ([OWNER, [send(1, 0), keep(0, 0)]], r"another of the ranks 0\.\.1 as peer, got 1"),
        ([OWNER, [send(2, 0), keep(0, 0)]], r"another of the ranks 0\.\.1 as peer, got 2"),
        ([OWNER, [send(0, 1), keep(0, 0)]], r"range of the chunks 0\.\.0, got 1 <= chunk < 2"),
        ([OWNER, []], "rank 1: expected a move that gives away.*chunk 0"),
        ([GIVER, OWNER], "another of the ranks"),
        ([[send(1, 0), keep(1, 0)], GIVER], "expected"),
    ],
)
def test_mistakes_are_named(programs, message: str) -> None:
    refused(made_of(*programs), message)


def test_a_deadlock_names_who_waits_for_what() -> None:
    # Ranks 1 and 2 expect the result from each other.
    waiting = made_of(
        [add(1, 0), add(2, 0), finalise(0)],
        [send(0, 0), keep(2, 0), send(2, 0)],
        [send(0, 0), keep(1, 0), send(1, 0)],
    )
    refused(
        waiting,
        r"deadlock: rank 1, move 1 \(keep 0 from rank 2\) waits for the final bytes of chunks "
        r"0..0 from rank 2 to rank 1; rank 2, move 1 .*waits for.* from rank 1 to rank 2$",
    )


def test_missing_contributions_are_named() -> None:
    # Ranks 0 and 1 wait for each other's partial sum; rank 2 waits for nobody.
    early = made_of(
        [add(1, 0), send(1, 0), keep(2, 0)],
        [add(0, 0), send(0, 0), keep(2, 0)],
        [finalise(0), send(0, 0), send(1, 0)],
    )
    refused(early, r"rank 2, move 0 \(finalise 0\).*but those of ranks 0, 1 are missing")


def test_a_range_must_be_in_one_state() -> None:
    mixed = made_of(
        [add(1, range(2)), finalise(0), send(1, range(2))],
        [send(0, range(2)), keep(0, range(2))],
        chunks=2,
    )
    refused(mixed, "one state for the whole range, but chunk 0 is 'final' and chunk 1")


def test_ranges_must_agree() -> None:
    halves = [send(0, 0), send(0, 1), keep(0, range(2))]
    whole = [add(1, range(2)), finalise(range(2)), send(1, range(2))]
    refused(made_of(whole, halves, chunks=2), "expected rank 0 to receive.*no such move")


def test_false_symmetry_is_found() -> None:
    refused(dataclasses.replace(central(3), symmetric=True), "chunks for")
    claims = made_of(
        [add(1, range(2)), finalise(range(2)), send(1, range(2))],
        [send(0, range(2)), keep(0, range(2))],
        chunks=2,
        symmetric=True,
    )
    refused(claims, "rank 1's program is not rank 0's, turned by 1")


@pytest.mark.parametrize("what", ["rounds", "sent", "received"])
def test_a_wrong_cost_is_found(what: str) -> None:
    schedule = ring(4)
    assert schedule.cost is not None
    for change in (-1, 1):
        wrong = dataclasses.replace(schedule.cost, **{what: getattr(schedule.cost, what) + change})
        refused(dataclasses.replace(schedule, cost=wrong), f"the cost says {what}")
    bound = dataclasses.replace(schedule.cost, rounds=100, exact=False)
    dataclasses.replace(schedule, cost=bound).verify()


def test_an_upper_bound_must_hold() -> None:
    low = Cost(1, Fraction(9), Fraction(9), lambda *_: 0, exact=False)
    refused(dataclasses.replace(ring(4), cost=low), "the cost says rounds = 1, but 6")


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (
            "reduce_scatter",
            r"move 5 \(send 0 to rank 1\): expected chunk 0 to be .*but it is 'final'",
        ),
        ("all_gather", r"move 0 \(send 2 to rank 1\): expected chunk 2 to be 'final'"),
        ("broadcast", r"move 0 \(send 2 to rank 1\): expected chunk 2 to be 'final'"),
    ],
)
def test_goals_differ(goal, message: str) -> None:
    refused(dataclasses.replace(ring(3), goal=goal), message)


def test_a_broadcast_has_one_root() -> None:
    two = made_of(
        [finalise(0), send(1, 0), keep(1, 1)],
        [finalise(1), send(0, 1), keep(0, 0)],
        chunks=2,
        goal="broadcast",
    )
    refused(two, "one root")
    assert dataclasses.replace(two, goal="all_gather").verify().rounds == 1


def test_halves_have_the_right_owners() -> None:
    crossed = made_of(
        [finalise(1), send(1, 1), keep(1, 0)],
        [finalise(0), send(0, 0), keep(0, 1)],
        chunks=2,
        goal="all_gather",
    )
    refused(crossed, "expected rank 1 to finalise chunk 1, but rank 0 does")
    refused(made_of([finalise(range(2))], chunks=2, goal="all_gather"), "as many chunks as ranks")


def mutated(schedule: Schedule, dice: random.Random) -> Schedule:
    """Change one thing in one rank's program, or several."""
    programs = [list(schedule.build(rank)) for rank in range(schedule.ranks)]
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        program = dice.choice([program for program in programs if program] or [[]])
        if not program:
            break
        here = dice.randrange(len(program))
        there = dice.randrange(len(program))
        move = program[here]
        change = dice.randrange(8)
        if change == 0:
            del program[here]
        elif change == 1:
            program.insert(there, move)
        elif change == 2:
            program[here], program[there] = program[there], program[here]
        elif change == 3:
            program[here] = move._replace(peer=dice.randrange(schedule.ranks))
        elif change == 4:
            program[here] = move._replace(last=move.last + dice.choice([-1, 1]))
        elif change == 5:
            program[here] = move._replace(first=move.first + dice.choice([-1, 1]))
        elif change == 6:
            program[here] = move._replace(kind=type(move.kind)(dice.randrange(4)))
        else:
            other = program[there]
            program[here] = move._replace(peer=other.peer)
            program[there] = other._replace(peer=move.peer)
    return Schedule("mutant", schedule.ranks, schedule.chunks, lambda rank: programs[rank])


@given(all_reduces(most=7), st.integers(0, 2**32))
@settings(max_examples=1200)
def test_no_mutant_that_does_harm_is_accepted(schedule: Schedule, seed: int) -> None:
    mutant = mutated(schedule, random.Random(seed))
    try:
        mutant.verify()
    except ScheduleError:
        return
    assert works(mutant, seed)


@given(all_reduces(most=6), st.integers(0, 2**32))
@settings(max_examples=400)
def test_no_harmless_mutant_is_refused(schedule: Schedule, seed: int) -> None:
    """Swapping neighbours in a program leaves the schedule right more often than not."""
    dice = random.Random(seed)
    programs = [list(schedule.build(rank)) for rank in range(schedule.ranks)]
    program = dice.choice(programs)
    here = dice.randrange(len(program))
    program[here - 1 : here + 1] = program[here - 1 : here + 1][::-1]
    mutant = Schedule("mutant", schedule.ranks, schedule.chunks, lambda rank: programs[rank])
    right = all(works(mutant, trial) for trial in range(3))
    try:
        mutant.verify()
    except ScheduleError:
        assert not right
    else:
        assert right
