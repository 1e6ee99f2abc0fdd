"""Verification of schedules by running them on symbols.

Instead of numbers, a chunk holds the set of ranks whose contributions are in it. The engine may
  order moves that share no chunk freely. This does not affect the result: on each chunk the order
  is fixed, so every run ends alike, and one run proves them all. For the goal ``all_reduce``,
  ``verify`` shows:
- each message has one sender and one receiver, who agree on its chunks;
- every run ends: no rank waits forever;
- each chunk has one owner, whose sum holds every contribution exactly once;
- every rank ends with that owner's bytes;
- rounds and bytes match the closed form.  In a mixture each rank finalises its own result, which
  holds its own contribution and those of its senders exactly once.  In a route each chunk is
  finalised by its source and kept by its target, each exactly once, and by no other rank.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from fractions import Fraction

from tfscale.collectives.flow import Flow, flow
from tfscale.collectives.moves import Kind, Move, ScheduleError
from tfscale.collectives.programs import Programs

Key = tuple[int, int, bool, int, int]  # sender, receiver, final, first, last
Place = tuple[int, int]  # rank, index of the move


@dataclasses.dataclass(frozen=True)
class Count:
    """Numbers that are counted while a schedule is verified.

    Args:
        rounds: length of the longest chain of messages that depend on each other.
        sent: number of buffers that the busiest sender sends.
        received: number of buffers that the busiest receiver receives.
        messages: number of messages that all ranks send together.
    """

    rounds: int
    sent: Fraction
    received: Fraction
    messages: int


def verify(schedule: Programs) -> Count:
    """Prove a schedule right; see ``Schedule.verify``."""
    flows = [flow(schedule, rank) for rank in range(schedule.ranks)]
    if schedule.symmetric:
        _check_symmetry(schedule, flows)
    if schedule.goal == "mixture":
        _check_whole(schedule)
    elif schedule.goal == "route":
        _check_route(schedule, flows)
    else:
        _check_owners(schedule, flows)
    receiver_of = _match(flows)
    rounds = _run(schedule, flows, receiver_of)
    count = Count(
        rounds,
        _busiest(schedule, flows, {Kind.SEND}),
        _busiest(schedule, flows, {Kind.ADD, Kind.KEEP}),
        len(receiver_of),
    )
    _check_cost(schedule, count)
    return count


def message_key(rank: int, move: Move, final: bool) -> Key:
    """Return the key of a message, which its sender and its receiver both know."""
    sender, receiver = (rank, move.peer) if move.kind is Kind.SEND else (move.peer, rank)
    return sender, receiver, final, move.first, move.last


def _places(flows: list[Flow]) -> Iterator[tuple[Place, Move, bool]]:
    for rank, one in enumerate(flows):
        for index, (move, final) in enumerate(zip(one.moves, one.final)):
            yield (rank, index), move, final


def _match(flows: list[Flow]) -> dict[Place, Place]:
    """Return the receiving move of each send."""
    sends: dict[Key, Place] = {}
    receives: dict[Key, Place] = {}
    for place, move, final in _places(flows):
        if move.kind is Kind.FINALISE:
            continue
        side = sends if move.kind is Kind.SEND else receives
        key = message_key(place[0], move, final)
        if key in side:
            raise ScheduleError(
                f"{_at(place, move)}: expected a message different from all others, but move "
                f"{side[key][1]} is the same"
            )
        side[key] = place
    for key, place in sends.items():
        if key not in receives:
            move = flows[place[0]].moves[place[1]]
            raise ScheduleError(
                f"{_at(place, move)}: expected rank {move.peer} to receive {_message(key)}, "
                "but it has no such move"
            )
    for key, place in receives.items():
        if key not in sends:
            move = flows[place[0]].moves[place[1]]
            raise ScheduleError(
                f"{_at(place, move)}: expected rank {move.peer} to send {_message(key)}, "
                f"but it has no such move: rank {place[0]} would wait forever"
            )
    return {place: receives[key] for key, place in sends.items()}


def _run(schedule: Programs, flows: list[Flow], receiver_of: dict[Place, Place]) -> int:
    """Run each move once its inputs are complete; return the number of rounds."""
    everyone = (1 << schedule.ranks) - 1  # a set of ranks is a number with these bits
    sums = [[1 << rank] * schedule.chunks for rank in range(schedule.ranks)]
    rounds = [[0] * schedule.chunks for _ in flows]
    waits = [
        [wait + (move.kind in (Kind.ADD, Kind.KEEP)) for wait, move in zip(one.waits, one.moves)]
        for one in flows
    ]
    arrived: dict[Place, tuple[int, list[int]]] = {}
    ready = deque((rank, i) for rank, wait in enumerate(waits) for i, w in enumerate(wait) if not w)
    done = 0

    def release(rank: int, index: int) -> None:
        waits[rank][index] -= 1
        if waits[rank][index] == 0:
            ready.append((rank, index))

    while ready:
        place = rank, index = ready.popleft()
        kind, _, first, last = move = flows[rank].moves[index]
        done += 1
        if kind is Kind.SEND:
            target = receiver_of[place]
            arrived[target] = max(rounds[rank][first:last]) + 1, sums[rank][first:last]
            release(*target)
        elif kind is Kind.FINALISE:
            if schedule.goal in ("all_reduce", "reduce_scatter"):
                for chunk in range(first, last):
                    _check_complete(place, move, chunk, everyone & ~sums[rank][chunk])
        else:
            round_, content = arrived.pop(place)
            for chunk, theirs in zip(range(first, last), content):
                rounds[rank][chunk] = max(rounds[rank][chunk], round_)
                if kind is Kind.ADD:
                    _check_disjoint(place, move, chunk, sums[rank][chunk] & theirs)
                    sums[rank][chunk] |= theirs
        for successor in flows[rank].successors[index]:
            release(rank, successor)
    if done < sum(len(one.moves) for one in flows):
        raise ScheduleError(_deadlock(flows, waits, arrived))
    return max(max(row) for row in rounds)


def _deadlock(
    flows: list[Flow], waits: list[list[int]], arrived: dict[Place, tuple[int, list[int]]]
) -> str:
    """Describe the first waiting move of each rank, whose earlier moves are done."""
    stuck = [
        f"{_at(place, move)} waits for {_message(message_key(place[0], move, final))}"
        for place, move, final in _places(flows)
        if waits[place[0]][place[1]] == 1
        and move.kind in (Kind.ADD, Kind.KEEP)
        and place not in arrived
        and not _waits_for_own(flows[place[0]], waits[place[0]], place[1])
    ]
    more = f"; and {len(stuck) - 6} more" if len(stuck) > 6 else ""
    return "deadlock: " + "; ".join(stuck[:6]) + more


def _waits_for_own(one: Flow, waits: list[int], index: int) -> bool:
    return any(index in one.successors[earlier] and waits[earlier] > 0 for earlier in range(index))


def _check_whole(schedule: Programs) -> None:
    if schedule.chunks != 1:
        raise ScheduleError(
            "mixture: expected one chunk, so that each rank gives all of its receivers the same "
            f"share, got {schedule.chunks} chunks"
        )


def _check_owners(schedule: Programs, flows: list[Flow]) -> None:
    owners: dict[int, Place] = {}
    for place, move, _ in _places(flows):
        if move.kind is Kind.FINALISE:
            for chunk in range(move.first, move.last):
                if chunk in owners:
                    raise ScheduleError(
                        f"{_at(place, move)}: expected one owner for chunk {chunk}, "
                        f"but rank {owners[chunk][0]} finalises it too"
                    )
                owners[chunk] = place
    for chunk in range(schedule.chunks):
        if chunk not in owners:
            raise ScheduleError(f"chunk {chunk}: expected an owner, but nobody finalises it")
    if schedule.goal == "broadcast" and len({rank for rank, _ in owners.values()}) > 1:
        raise ScheduleError("a broadcast has one root, but several ranks finalise chunks")
    if schedule.goal in ("reduce_scatter", "all_gather"):
        if schedule.chunks != schedule.ranks:
            raise ScheduleError(
                f"{schedule.goal}: expected as many chunks as ranks, "
                f"got {schedule.chunks} chunks and {schedule.ranks} ranks"
            )
        for chunk, (rank, _) in owners.items():
            if rank != chunk:
                raise ScheduleError(
                    f"{schedule.goal}: expected rank {chunk} to finalise chunk {chunk}, "
                    f"but rank {rank} does"
                )


def _check_route(schedule: Programs, flows: list[Flow]) -> None:
    assert schedule.route is not None
    held: set[tuple[Kind, int]] = set()
    for (rank, index), move, _ in _places(flows):
        if move.kind is Kind.SEND:
            continue
        for chunk in range(move.first, move.last):
            source, target = schedule.route(chunk)
            right, role = (source, "source") if move.kind is Kind.FINALISE else (target, "target")
            if rank != right:
                raise ScheduleError(
                    f"{_at((rank, index), move)}: expected only rank {right}, the {role} of chunk "
                    f"{chunk}, to {move.kind.name.lower()} it"
                )
            held.add((move.kind, chunk))
    for chunk in range(schedule.chunks):
        source, target = schedule.route(chunk)
        if (Kind.FINALISE, chunk) not in held:
            raise ScheduleError(f"chunk {chunk}: expected rank {source} to finalise it, its source")
        if source != target and (Kind.KEEP, chunk) not in held:
            raise ScheduleError(f"chunk {chunk}: expected rank {target} to keep it, its target")


def _check_complete(place: Place, move: Move, chunk: int, missing: int) -> None:
    if missing:
        raise ScheduleError(
            f"{_at(place, move)}: expected the contributions of all ranks in chunk {chunk}, "
            f"but those of {_ranks(missing)} are missing"
        )


def _check_disjoint(place: Place, move: Move, chunk: int, twice: int) -> None:
    if twice:
        raise ScheduleError(
            f"{_at(place, move)}: expected contributions that chunk {chunk} does not yet hold, "
            f"but those of {_ranks(twice)} come twice"
        )


def _check_symmetry(schedule: Programs, flows: list[Flow]) -> None:
    if schedule.chunks % schedule.ranks:
        raise ScheduleError(
            "a symmetric schedule has as many chunks for each rank, "
            f"got {schedule.chunks} chunks for {schedule.ranks} ranks"
        )
    for rank, one in enumerate(flows):
        turned = tuple(turn(schedule, move, rank) for move in flows[0].moves)
        if turned != tuple(one.moves):
            raise ScheduleError(
                f"expected a symmetric schedule, as it claims to be, but rank {rank}'s program "
                f"is not rank 0's, turned by {rank}"
            )


def is_symmetric(schedule: Programs) -> bool:
    """Return whether every rank's program is rank 0's, turned by its number, declared or not."""
    if schedule.chunks % schedule.ranks:
        return False
    first = schedule.program(0)
    return all(
        tuple(turn(schedule, move, rank) for move in first) == schedule.program(rank)
        for rank in range(1, schedule.ranks)
    )


def turn(schedule: Programs, move: Move, by: int) -> Move:
    """Return the move of rank r+by in a symmetric schedule in which rank r makes ``move``."""
    peer = move.peer if move.kind is Kind.FINALISE else (move.peer + by) % schedule.ranks
    first = (move.first + by * (schedule.chunks // schedule.ranks)) % schedule.chunks
    return Move(move.kind, peer, first, first + move.last - move.first)


def _busiest(schedule: Programs, flows: list[Flow], kinds: set[Kind]) -> Fraction:
    chunks = (sum(s.last - s.first for s in one.moves if s.kind in kinds) for one in flows)
    return Fraction(max(chunks), schedule.chunks)


def _check_cost(schedule: Programs, count: Count) -> None:
    stated = schedule.cost
    if stated is None:
        return
    for what in ("rounds", "sent", "received"):
        said, counted = getattr(stated, what), getattr(count, what)
        if said != counted and (stated.exact or said < counted):
            raise ScheduleError(
                f"{schedule.name}: the cost says {what} = {said}, but {counted} was counted"
            )


def _at(place: Place, move: Move) -> str:
    return f"rank {place[0]}, move {place[1]} ({move})"


def _message(key: Key) -> str:
    sender, receiver, final, first, last = key
    phase = "final bytes" if final else "partial sum"
    return f"the {phase} of chunks {first}..{last - 1} from rank {sender} to rank {receiver}"


def _ranks(bits: int) -> str:
    members = [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
    more = f" and {len(members) - 8} more" if len(members) > 8 else ""
    return f"ranks {', '.join(map(str, members[:8]))}{more}"
