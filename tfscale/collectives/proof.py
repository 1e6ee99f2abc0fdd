"""Verification of users' schedules before they run: a wrong one would silently give wrong sums."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tfscale.collectives.moves import Program, ScheduleError
from tfscale.collectives.schedule import Schedule

# The limit for making the schedule and all ranks' programs. Those of 256 ranks take a second; an
# endless loop takes forever.
BUILD_SECONDS = 60.0

_proven: weakref.WeakSet[Schedule] = weakref.WeakSet()


def trusted(schedule: Schedule) -> Schedule:
    """Mark a schedule as correct: the tests of tfscale prove it."""
    _proven.add(schedule)
    return schedule


def proven(make: Callable[[], Schedule], what: object) -> Schedule:
    """Return a user's schedule if it is correct; it runs the same programs that were verified.

    Args:
        make: makes the schedule, perhaps by calling a user's function.
        what: the user's object, for messages.

    Raises:
        ScheduleError: the schedule is wrong, or takes too long.
    """

    def build() -> tuple[Schedule, list[Program]]:
        schedule = make()
        if schedule in _proven:
            return schedule, []
        return schedule, [schedule.program(rank) for rank in range(schedule.ranks)]

    schedule: Schedule
    schedule, programs = _within(BUILD_SECONDS, build, what)
    if not programs:
        return schedule
    fixed = dataclasses.replace(schedule, build=lambda rank: programs[rank])
    try:
        fixed.verify()
    except ScheduleError as error:
        raise ScheduleError(
            f"the schedule {schedule.name!r} for {schedule.ranks} ranks would not give the right "
            f"{schedule.goal.replace('_', '-')}: {error}. Correct the function that makes it; "
            "its verify() says whether it is right."
        ) from error
    return trusted(fixed)


def _within(seconds: float, call: Callable[[], Any], what: object) -> Any:
    """Return or raise the outcome of a call if it ends in time; the call itself continues."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="tfscale-schedule", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise ScheduleError(
            f"{what!r:.200} has not made the programs of all ranks within {seconds:g} s: expected "
            "a function that yields the few moves of each rank and returns. Is there an "
            "endless loop in it?"
        )
    return outcome[0]
