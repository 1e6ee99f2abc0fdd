"""Schedules that users write are proven, once, before they run."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

import pytest

from tfscale.collectives import (
    ALGORITHMS,
    Move,
    Schedule,
    ScheduleError,
    add,
    broadcast,
    finalise,
    keep,
    proof,
    resolve,
    ring,
    send,
)


def two_pairs(ranks: int) -> Schedule:
    """Each pair sums by itself: nobody has the sum of all."""

    def build(rank: int) -> Iterator[Move]:
        partner = rank ^ 1
        if rank % 2:
            yield send(partner, 0)
            yield keep(partner, 0)
        else:
            yield add(partner, 0)
            yield finalise(0)
            yield send(partner, 0)

    return Schedule("two pairs", ranks, 1, build)


def nothing(ranks: int) -> Schedule:
    return Schedule("nothing", ranks, 1, lambda rank: [finalise(0)])


WRONG = {"nothing": nothing, "two pairs": two_pairs}


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule_is_refused_by_name(name: str, made: bool) -> None:
    algorithm = WRONG[name](4) if made else WRONG[name]
    with pytest.raises(ScheduleError, match=f"'{name}' for 4 ranks would not give the right all-r"):
        resolve(algorithm, 4)


def test_one_of_ours_that_was_changed_is_not_ours() -> None:
    changed = dataclasses.replace(ring(4), build=lambda rank: ring(4).program(rank)[:-1])
    with pytest.raises(ScheduleError, match="'ring' for 4 ranks would not"):
        resolve(changed, 4)


def test_a_schedule_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []
    verify = Schedule.verify
    monkeypatch.setattr(Schedule, "verify", lambda self: verified.append(self) or verify(self))
    proven = resolve(ring(4), 4)
    assert resolve(proven, 4) is proven
    assert len(verified) == 1
    for name, make in ALGORITHMS.items():
        resolve(name, 4), resolve(make, 4)
    assert len(verified) == 1


def test_what_runs_is_what_was_proven() -> None:
    """A function that gives other moves when it is asked again."""
    asked = itertools.count()

    def build(rank: int) -> list[Move]:
        return list(ring(2).program(rank)) if next(asked) < 2 else [finalise(0)]

    proven = resolve(Schedule("fickle", 2, 2, build), 2)
    assert [proven.program(rank) for rank in range(2)] == [ring(2).program(r) for r in range(2)]


def test_a_build_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "BUILD_SECONDS", 0.2)

    def stuck(ranks: int) -> Schedule:
        for _ in range(600):  # longer than the test waits
            time.sleep(0.1)
        return ring(ranks)

    with pytest.raises(ScheduleError, match="stuck.* within 0.2 s.*endless loop"):
        resolve(stuck, 2)


def test_a_program_without_end_is_an_error() -> None:
    endless = Schedule("endless", 2, 1, lambda rank: itertools.repeat(finalise(0)))
    with pytest.raises(ScheduleError, match="more than 1,000,000 moves"):
        resolve(endless, 2)


def test_what_a_function_raises_is_raised() -> None:
    def broken(ranks: int) -> Schedule:
        raise KeyError("rack")

    with pytest.raises(KeyError, match="rack"):
        resolve(broken, 2)


def test_steps_are_steps() -> None:
    numbers = Schedule("numbers", 2, 1, lambda rank: [(2, -1, 0, 1)])  # type: ignore[list-item]
    with pytest.raises(ScheduleError, match=r"rank 0, move 0: expected what send, add.*\(2, -1"):
        resolve(numbers, 2)


def test_a_schedule_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule of broadcast; expected one of all_reduce"):
        resolve(broadcast(3), 3)


@pytest.mark.parametrize("name", ["", "a" * 201, "two\nlines", "zero\0byte", None, b"bytes"])
def test_a_name_is_a_short_line(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 printable characters"):
        Schedule(name, 2, 1, lambda rank: [])
