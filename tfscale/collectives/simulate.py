"""Simulation of a schedule on the machine of ``cost.py``, message by message."""

from __future__ import annotations

import dataclasses
import heapq
from typing import NamedTuple

from tfscale.collectives.cost import Cluster, Link, Machine, checked_machine
from tfscale.collectives.flow import flow
from tfscale.collectives.moves import Kind, Move, ScheduleError
from tfscale.collectives.programs import A_SCHEDULE, Programs
from tfscale.collectives.verify import Key, is_symmetric, message_key
from tfscale.support import arguments
from tfscale.support.garbage import without_collection

_MOST_PARTS = 1_000_000  # each part takes memory


class Message(NamedTuple):
    """A message, with the times when its first byte left and its last byte arrived."""

    sender: int
    receiver: int
    first: int
    last: int
    final: bool
    part: int
    left: float
    arrived: float


class Final(NamedTuple):
    """A range of chunks that its owner finalised."""

    time: float
    rank: int
    first: int
    last: int
    part: int


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Args:
        seconds: time when the last rank finished.
        sent: bytes sent, by rank.
        received: bytes received, by rank.
        finalised: finalised chunks in order of time; only if messages are recorded.
        messages: messages in order of arrival; only if messages are recorded.
    """

    seconds: float
    sent: list[float]
    received: list[float]
    finalised: list[Final]
    messages: list[Message]


def simulate(
    schedule: Programs,
    nbytes: float,
    machine: Machine,
    *,
    gamma: float = 0,
    parts: int = 1,
    messages: bool = False,
) -> Simulation:
    """Simulate a schedule on a machine: how long it takes, and what happens meanwhile.

    Args:
        schedule: any schedule; one that contradicts itself is refused as by ``verify``.
        nbytes: size of the buffer; its chunks count as equal.
        machine: a ``Link`` (all links are equal) or a ``Cluster``.
        gamma: seconds to add one byte.
        parts: number of parts into which the engine cuts the buffer; it runs the whole program on
            each, and they overlap.
        messages: whether to record each message, and each range that becomes final.

    Example:
        >>> from tfscale.collectives import ring
        >>> simulate(ring(4), 4000, Link(alpha=1, beta=0.001)).seconds
        12.0
    """
    checked_machine(machine, "machine")
    arguments.real(nbytes, "nbytes", 0, what="a number of bytes")
    arguments.real(gamma, "gamma", 0, what="a number of seconds per byte")
    parts = arguments.whole(parts, "parts", 1, _MOST_PARTS, what="a number of parts")
    messages = arguments.flag(messages, "messages")
    arguments.instance(schedule, "schedule", Programs, A_SCHEDULE)
    period = _period(schedule, machine) if not messages else schedule.ranks
    with without_collection():  # the collector would take a third of the time
        return _Run(schedule, nbytes, machine, gamma, parts, period, messages).run()


def _period(schedule: Programs, machine: Machine) -> int:
    """Return the number of ranks that stand for all, if schedule and machine are symmetric."""
    if not schedule.symmetric and not is_symmetric(schedule):
        return schedule.ranks
    if isinstance(machine, Link):
        return 1
    return machine.sizes[0] if len(set(machine.sizes)) == 1 else schedule.ranks


# The kinds of event, in the order in which events of one moment are handled. Each can cause only
# later kinds at the same moment, so ranks that do the same stay in step.
_DELIVERED, _ADDED, _READY, _ARRIVING = range(4)


class _Run:
    """The state of one simulation.

    A task is one move of one rank on one part. Its number orders the tasks of one moment: by part,
    then by place in the program, then by rank.

    Only the ranks below ``period`` are simulated; each stands for others. A message to rank p goes
    to the simulated rank that stands for p, and its sender is renumbered by the same distance.
    """

    def __init__(
        self,
        schedule: Programs,
        nbytes: float,
        machine: Machine,
        gamma: float,
        parts: int,
        period: int,
        record: bool,
    ) -> None:
        if parts < 1:
            raise ValueError(f"needs at least one part, got {parts}")
        if isinstance(machine, Cluster) and sum(machine.sizes) != schedule.ranks:
            raise ValueError(
                f"{schedule.name} has {schedule.ranks} ranks, the cluster {sum(machine.sizes)}"
            )
        self.schedule, self.parts, self.period, self.record = schedule, parts, period, record
        self.chunk_bytes = nbytes / (schedule.chunks * parts)
        self.gamma = gamma
        self.flows = [flow(schedule, rank) for rank in range(period)]
        # A slot is a task's number within its part.
        self.stride = period * max(len(one.moves) for one in self.flows)
        self._lay_out(machine)
        # The time from which on each port and adder is free.
        self.out_free = [[0.0] * period, [0.0] * period]
        self.in_free = [[0.0] * period, [0.0] * period]
        self.adder_free = [0.0] * period
        self.moments: dict[float, list[list[int]]] = {}
        self.times: list[float] = []
        self.end: float = 0
        self.departure: dict[int, float] = {}
        self.result = Simulation(0, [], [], [], [])

    def _lay_out(self, machine: Machine) -> None:
        """Compute, slot by slot, everything that does not depend on time."""
        if isinstance(machine, Link):
            links, group = (machine, machine), [0] * self.schedule.ranks
        else:
            links = (machine.inner, machine.outer)
            group = [g for g, size in enumerate(machine.sizes) for _ in range(size)]
        self.moves: list[Move | None] = [None] * self.stride
        self.final = [False] * self.stride
        self.successors: list[list[int]] = [[]] * self.stride
        self.level = [0] * self.stride
        # time of the port for the message of this slot
        self.busy: list[float] = [0.0] * self.stride
        waits = [0] * self.stride
        receivers: dict[Key, int] = {}
        for rank, one in enumerate(self.flows):
            for index, move in enumerate(one.moves):
                slot = index * self.period + rank
                self.moves[slot], self.final[slot] = move, one.final[index]
                self.successors[slot] = [i * self.period + rank for i in one.successors[index]]
                receives = move.kind is Kind.ADD or move.kind is Kind.KEEP
                waits[slot] = one.waits[index] + receives
                if move.kind is not Kind.FINALISE:
                    level = int(group[rank] != group[move.peer])
                    self.level[slot] = level
                    chunks = move.last - move.first
                    self.busy[slot] = links[level].seconds(chunks * self.chunk_bytes)
                if receives:
                    receivers[message_key(rank, move, one.final[index])] = slot
        self.waits = waits * self.parts
        self.target = [-1] * self.stride  # the slot that receives the message of this slot
        for slot, send in enumerate(self.moves):
            if send is not None and send.kind is Kind.SEND:
                rank = slot % self.period
                key = self._simulated_key(message_key(rank, send, self.final[slot]))
                if key not in receivers:
                    raise ScheduleError(f"nobody receives rank {rank}'s '{send}': see verify()")
                self.target[slot] = receivers[key]

    def run(self) -> Simulation:
        todo = [
            part * self.stride + slot
            for part in range(self.parts)
            for slot, move in enumerate(self.moves)
            if move is not None
        ]
        self.left = len(todo)
        for task in [task for task in todo if self.waits[task] == 0]:
            self._begin(0, task)
        handlers = self._deliver, self._finish, self._leave, self._arrive
        while self.times:
            time = heapq.heappop(self.times)
            moment = self.moments[time]
            while (kind := next((k for k in range(4) if moment[k]), None)) is not None:
                handlers[kind](time, heapq.heappop(moment[kind]))
            del self.moments[time]
        if self.left:
            raise ScheduleError(f"{self.schedule.name} does not end: see verify()")
        sent = self._bytes({Kind.SEND})
        received = self._bytes({Kind.ADD, Kind.KEEP})
        return dataclasses.replace(self.result, seconds=self.end, sent=sent, received=received)

    def _at(self, time: float, kind: int, task: int) -> None:
        if time not in self.moments:
            self.moments[time] = [[], [], [], []]
            heapq.heappush(self.times, time)
        heapq.heappush(self.moments[time][kind], task)

    def _begin(self, time: float, task: int) -> None:
        """Begin a task whose inputs are complete."""
        move = self.moves[task % self.stride]
        assert move is not None
        if move.kind is Kind.SEND:
            self._at(time, _READY, task)
        elif move.kind is Kind.ADD and self.gamma:
            rank = task % self.period
            start = max(time, self.adder_free[rank])
            end = start + self.gamma * (move.last - move.first) * self.chunk_bytes
            self.adder_free[rank] = end
            self._at(end, _ADDED, task)
        else:
            if self.record and move.kind is Kind.FINALISE:
                self._note_final(time, task, move)
            self._finish(time, task)

    def _leave(self, time: float, task: int) -> None:
        """Queue a message at its sender's port; the sender continues."""
        part, slot = divmod(task, self.stride)
        free = self.out_free[self.level[slot]]
        start = max(time, free[task % self.period])
        free[task % self.period] = start + self.busy[slot]
        target = part * self.stride + self.target[slot]
        if self.record:
            self.departure[target] = start
        self._at(start, _ARRIVING, target)
        self._finish(time, task)

    def _arrive(self, time: float, task: int) -> None:
        """Queue a message at its receiver's port."""
        slot = task % self.stride
        free = self.in_free[self.level[slot]]
        end = max(time, free[task % self.period]) + self.busy[slot]
        free[task % self.period] = end
        self._at(end, _DELIVERED, task)

    def _deliver(self, time: float, task: int) -> None:
        if self.record:
            self._note_message(time, task)
        self._release(time, task)

    def _finish(self, time: float, task: int) -> None:
        self.left -= 1
        self.end = max(self.end, time)
        slot = task % self.stride
        for successor in self.successors[slot]:
            self._release(time, task - slot + successor)

    def _release(self, time: float, task: int) -> None:
        self.waits[task] -= 1
        if self.waits[task] == 0:
            self._begin(time, task)

    def _simulated_key(self, key: Key) -> Key:
        """Return a message's key as the simulated rank that stands for the receiver sees it."""
        sender, receiver, final, first, last = key
        here = receiver % self.period
        if here == receiver:
            return key
        ranks, chunks = self.schedule.ranks, self.schedule.chunks
        back = receiver - here
        turned = (first - back * (chunks // ranks)) % chunks
        return (sender - back) % ranks, here, final, turned, turned + last - first

    def _note_message(self, time: float, task: int) -> None:
        part, slot = divmod(task, self.stride)
        move = self.moves[slot]
        assert move is not None
        left = self.departure.pop(task)
        rank, final = slot % self.period, self.final[slot]
        message = Message(move.peer, rank, move.first, move.last, final, part, left, time)
        self.result.messages.append(message)

    def _note_final(self, time: float, task: int, move: Move) -> None:
        part, rank = task // self.stride, task % self.period
        self.result.finalised.append(Final(time, rank, move.first, move.last, part))

    def _bytes(self, kinds: set[Kind]) -> list[float]:
        each = [
            sum(move.last - move.first for move in one.moves if move.kind in kinds)
            * (self.parts * self.chunk_bytes)
            for one in self.flows
        ]
        return [each[rank % self.period] for rank in range(self.schedule.ranks)]
