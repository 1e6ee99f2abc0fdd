"""Analysis of one rank's program: what each move carries, and which moves it waits for."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tfscale.collectives.moves import Goal, Kind, Program, ScheduleError
from tfscale.collectives.programs import Programs

State = Literal["open", "given", "mixed", "final"]  # state of a chunk at a rank

# The state of a chunk after a move. Combinations that are not listed are errors.
_GIVING: dict[tuple[Kind, State], State] = {
    (Kind.ADD, "open"): "open",
    (Kind.SEND, "open"): "given",
    (Kind.FINALISE, "open"): "final",
}
_SHARING: dict[tuple[Kind, State], State] = {(Kind.SEND, "final"): "final"}
_ONE_WAY: dict[tuple[Kind, State], State] = {  # only the owner's contribution counts
    **_SHARING,
    (Kind.FINALISE, "open"): "final",
    (Kind.KEEP, "open"): "final",
}
_MIXING: dict[tuple[Kind, State], State] = {  # a rank sends only its own contribution
    (Kind.SEND, "open"): "open",
    (Kind.ADD, "open"): "mixed",
    (Kind.ADD, "mixed"): "mixed",
    (Kind.FINALISE, "open"): "final",
    (Kind.FINALISE, "mixed"): "final",
}
_RULES: dict[Goal, dict[tuple[Kind, State], State]] = {
    "all_reduce": {**_GIVING, **_SHARING, (Kind.KEEP, "given"): "final"},
    "reduce_scatter": _GIVING,
    "all_gather": _ONE_WAY,
    "broadcast": _ONE_WAY,
    "mixture": _MIXING,
    "route": _ONE_WAY,
}
_MEANING: dict[State, str] = {
    "open": "my partial sum, neither given away nor final",
    "given": "given away",
    "mixed": "mixed with what others gave",
    "final": "final",
}


class Flow(NamedTuple):
    """A program with the consequences of each move."""

    moves: Program
    final: list[bool]  # the move carries final bytes, not a partial sum
    successors: list[list[int]]  # the later moves that wait for this one
    waits: list[int]  # number of earlier moves that it waits for, without its message


def flow(schedule: Programs, rank: int) -> Flow:
    """Analyse one rank's program; raise ``ScheduleError`` if it contradicts itself."""
    moves = schedule.program(rank)
    rules = [
        {state: after for (kind, state), after in _RULES[schedule.goal].items() if kind is each}
        for each in Kind
    ]
    distinct = {0, schedule.chunks}
    for index, (kind, peer, first, last) in enumerate(moves):
        other = kind is Kind.FINALISE or (peer != rank and 0 <= peer < schedule.ranks)
        if not (other and 0 <= first < last <= schedule.chunks):
            raise ScheduleError(_out_of_bounds(schedule, rank, index))
        distinct.add(first)
        distinct.add(last)
    # Handle chunks that all moves treat alike as one.
    cuts = sorted(distinct)
    place = {cut: number for number, cut in enumerate(cuts)}
    states: list[State] = ["open"] * (len(cuts) - 1)
    latest = [-1] * (len(cuts) - 1)  # last move on these chunks
    final: list[bool] = []
    waits: list[int] = []
    successors: list[list[int]] = [[] for _ in moves]
    for index, (kind, _, first, last) in enumerate(moves):
        start, stop = place[first], place[last]
        before = states[start]
        after = rules[kind].get(before)
        if after is None or (stop > start + 1 and len(set(states[start:stop])) > 1):
            raise ScheduleError(_refusal(schedule, rank, index, cuts, states[start:stop]))
        earlier = set(latest[start:stop])
        earlier.discard(-1)
        for one in earlier:
            successors[one].append(index)
        states[start:stop] = [after] * (stop - start)
        latest[start:stop] = [index] * (stop - start)
        waits.append(len(earlier))
        final.append(before == "final" or kind is Kind.KEEP or kind is Kind.FINALISE)
    _check_end(schedule, rank, cuts, states)
    return Flow(moves, final, successors, waits)


def _out_of_bounds(schedule: Programs, rank: int, index: int) -> str:
    move = schedule.program(rank)[index]
    where = f"rank {rank}, move {index} ({move}): "
    if not 0 <= move.first < move.last <= schedule.chunks:
        return (
            f"{where}expected a range of the chunks 0..{schedule.chunks - 1}, "
            f"got {move.first} <= chunk < {move.last}"
        )
    return f"{where}expected another of the ranks 0..{schedule.ranks - 1} as peer, got {move.peer}"


def _refusal(
    schedule: Programs, rank: int, index: int, cuts: list[int], states: list[State]
) -> str:
    """Explain why a move is wrong, and what was expected."""
    move = schedule.program(rank)[index]
    where = f"rank {rank}, move {index} ({move}): "
    if len(set(states)) > 1:
        other = next(number for number, state in enumerate(states) if state != states[0])
        chunk = cuts[cuts.index(move.first) + other]
        return (
            f"{where}expected one state for the whole range, but chunk {move.first} is "
            f"'{_MEANING[states[0]]}' and chunk {chunk} is '{_MEANING[states[other]]}'"
        )
    allowed = [state for kind, state in _RULES[schedule.goal] if kind is move.kind]
    if not allowed:
        return f"{where}expected no such move in a schedule whose goal is {schedule.goal}"
    expected = " or ".join(f"'{_MEANING[state]}'" for state in allowed)
    return f"{where}expected chunk {move.first} to be {expected}, but it is '{_MEANING[states[0]]}'"


def _check_end(schedule: Programs, rank: int, cuts: list[int], states: list[State]) -> None:
    if schedule.goal == "route":
        return  # a rank has nothing to do with most chunks; verify.py looks at all ranks' ends
    for chunk, state in zip(cuts, states):
        if state in ("open", "mixed"):
            raise ScheduleError(
                f"rank {rank}: expected a move that gives away, finalises or keeps chunk {chunk}, "
                "but the program ends without one"
            )
        if state == "given" and schedule.goal != "reduce_scatter":
            raise ScheduleError(
                f"rank {rank}: gives chunk {chunk} away; expected a move that keeps the result, "
                "but the program ends without one. If the sum is complete here, add "
                f"finalise({chunk}) before it is sent"
            )
