"""One attempt: the start of all workers, until all have ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tfscale.cluster import addresses
from tfscale.cluster.sources import ALL_BARS
from tfscale.tools.launch import endings, processes
from tfscale.tools.launch.hosts import Host, Place, places
from tfscale.tools.launch.local import cluster_environment
from tfscale.tools.launch.output import Logs, Screen
from tfscale.tools.launch.request import Request
from tfscale.tools.launch.supervised import HostError, Supervised

_NOTICE = 3.0  # seconds in which other workers may learn of a failure, and end by themselves


class HostsLost(HostError):
    """Raised if hosts cannot take part."""

    def __init__(self, hosts: set[int], message: str) -> None:
        super().__init__(message)
        self.hosts = hosts


class Ended(NamedTuple):
    """The end of a worker."""

    place: Place
    code: int  # or minus the number of the signal that ended it
    after: float  # seconds
    not_first: bool = False  # it failed because another had failed
    why: str = ""  # the reason, if it could not be started or its host was lost

    @property
    def status(self) -> int:
        """Exit status, as shells report it."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def how(self) -> str:
        """Description of the worker's end."""
        return self.why or f"it {endings.describe(self.code)}"


@dataclass
class Outcome:
    """The result of an attempt."""

    ends: list[Ended] = field(default_factory=list)  # in order of time
    lost: set[int] = field(default_factory=set)  # hosts
    # by the rank of the worker that wrote one
    timelines: dict[int, str] = field(default_factory=dict)

    @property
    def first(self) -> Ended | None:
        """The first failure that does not follow from another one."""
        failed = [end for end in self.ends if end.code]
        own = [end for end in failed if not end.not_first]
        return next(iter(own or failed), None)


class Attempt:
    """One start of all workers, and their supervision.

    Args:
        request: the user's request.
        hosts: the hosts that take part.
        screen, logs: destinations of the workers' output.
        room: waits until there is room for more on the screen.
    """

    def __init__(
        self,
        request: Request,
        hosts: Sequence[Host],
        screen: Screen,
        logs: Logs,
        room: Callable[[], Awaitable[None]],
    ) -> None:
        self._request = request
        self._hosts = hosts
        self._screen = screen
        self._logs = logs
        self._room = room
        self._outcome = Outcome()
        self._supervisors: list[Supervised] = []
        self._is_ending = False
        self._task: asyncio.Task[object] | None = None
        self._places: list[Place] = []
        self._running: dict[int, Place] = {}

    @property
    def has_begun(self) -> bool:
        """Whether workers were started."""
        return bool(self._places)

    async def run(self) -> Outcome:
        """Run until all workers have ended; raise ``HostError`` if a host cannot take part."""
        self._task = asyncio.current_task()
        others = processes.children(os.getpid())
        processes.adopt_orphans()
        try:
            await self._begin()
            addresses, first_rank = await self._addresses()
            self._began = time.monotonic()
            self._places = places(self._hosts, first_rank)
            self._running = {place.rank: place for place in self._places}
            self._start(addresses)
            await asyncio.gather(
                *(self._watch(at, one) for at, one in enumerate(self._supervisors))
            )
        finally:
            await asyncio.gather(*(one.end() for one in self._supervisors))
            processes.kill_children(but=others)  # left behind by a killed supervisor
        return self._outcome

    def pass_on(self, number: int) -> None:
        """Send all workers a signal; before the start, SIGTERM cancels the attempt."""
        if self.has_begun:
            self.signal(number)
        elif number == signal.SIGTERM and self._task is not None:
            self._task.cancel()

    def signal(self, number: int) -> None:
        """Send all workers a signal."""
        for one in self._supervisors:
            one.tell(signal=number)

    def stop(self, number: int) -> None:
        """End at the user's request: by this signal, and by force after the grace period.

        Before workers were started, this cancels ``run``. A supervisor that does not end its
        workers in time, such as a stopped one, is ended together with them.
        """
        if self.has_begun:
            self.signal(number)
            self._end_later(self._request.grace)
            for one in self._supervisors:
                longest = self._request.grace + one.longest_end
                asyncio.get_running_loop().call_later(longest, one.kill)
        elif self._task is not None:
            self._task.cancel()

    # -- beginning

    async def _begin(self) -> None:
        request = self._request
        loopback = all(host.is_here for host in self._hosts) and request.nodes is None
        begun = await asyncio.gather(
            *(
                Supervised.begin(
                    host,
                    ssh=request.ssh,
                    python=request.python,
                    loopback=loopback,
                    grace=request.grace,
                    silence=request.silence,
                )
                for host in self._hosts
            ),
            return_exceptions=True,
        )
        self._supervisors = [one for one in begun if isinstance(one, Supervised)]
        errors = [one for one in begun if isinstance(one, BaseException)]
        self._outcome.lost = {at for at, one in enumerate(begun) if isinstance(one, HostError)}
        for error in errors:
            if not isinstance(error, HostError):
                raise error
        if errors:
            raise HostsLost(self._outcome.lost, "; ".join(map(str, errors)))

    def _start(self, addresses: Sequence[str]) -> None:
        request = self._request
        for at, one in enumerate(self._supervisors):
            one.tell(
                start=[
                    {
                        "rank": place.rank,
                        "share": [place.local, self._hosts[at].workers],
                        "environment": {
                            **cluster_environment(addresses, place.rank),
                            **_torchrun_variables(place, self._hosts[at].workers, len(addresses)),
                        },
                    }
                    for place in self._places
                    if place.host == at
                ],
                command=request.command,
                folder=request.folder,
                # Unbuffered, so that lines come as they are printed.
                environment={
                    **request.environment,
                    "PYTHONUNBUFFERED": "1",
                    **({ALL_BARS: "1"} if request.all_bars else {}),
                },
                devices=request.devices,
                bind=request.bind,
                timeline=request.timeline is not None,
            )

    async def _addresses(self) -> tuple[list[str], int]:
        """Return the addresses of all workers, and the rank of the first one on these hosts."""
        if self._request.nodes:
            ports = self._supervisors[0].greeting["ports"]
            each = await self._request.nodes.meet(ports, self._screen.say)
            first_rank = sum(map(len, each[: self._request.nodes.rank]))
            return [address for node in each for address in node], first_rank
        found = []
        for one in self._supervisors:
            host = _address(one, self._supervisors)
            found += [addresses.join(host, port) for port in one.greeting["ports"]]
        return found, 0

    # -- watching

    async def _watch(self, at: int, one: Supervised) -> None:
        mine = {place.rank for place in self._places if place.host == at}
        while mine & set(self._running):
            message = await one.next()
            if message is None:
                self._lost(at, mine, one)
                return
            self._heed(message, mine)
            if isinstance(why := message.get("ends"), str):
                self._screen.say(f"{one.host.name} ends its workers: {why}")
            await self._room()

    def _heed(self, message: Mapping[str, object], mine: set[int]) -> None:
        rank = message.get("rank")
        if not isinstance(rank, int) or rank not in mine:
            return
        for stream, what in ((self._screen.out, "text"), (self._screen.err, "error")):
            if isinstance(text := message.get(what), str):
                self._screen.heard(rank, text, stream)
                self._logs.heard(rank, text)
        if isinstance(text := message.get("timeline"), str):
            timelines = self._outcome.timelines
            timelines[rank] = timelines.get(rank, "") + text
        if isinstance(code := message.get("ended"), int) and rank in self._running:
            self._screen.ended(rank)
            self._ended(rank, code, bool(message.get("not_first")), str(message.get("why", "")))

    def _lost(self, at: int, mine: set[int], one: Supervised) -> None:
        self._outcome.lost.add(at)
        for rank in sorted(mine & set(self._running)):
            self._ended(rank, 255, False, f"its host was lost: {one.lost()}")

    def _ended(self, rank: int, code: int, not_first: bool, why: str) -> None:
        place = self._running.pop(rank)
        after = time.monotonic() - self._began
        self._outcome.ends.append(Ended(place, code, after, not_first, why))
        if code:
            self._end_later(_NOTICE)

    def _end_later(self, seconds: float) -> None:
        if not self._is_ending:
            self._is_ending = True
            asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        for one in self._supervisors:
            one.tell(end=True)


def _torchrun_variables(place: Place, on_host: int, workers: int) -> dict[str, str]:
    """Return torchrun's variables; without MASTER_ADDR they do not define a cluster."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(place.local),
        "LOCAL_WORLD_SIZE": str(on_host),
    }


def _address(one: Supervised, all_of_them: Sequence[Supervised]) -> str:
    """Return the address at which other hosts' workers reach a host's workers."""
    if all(each.host.is_here for each in all_of_them):
        return "127.0.0.1"
    if not one.host.is_here:
        name = one.host.name.rpartition("@")[2].strip("[]")
        if addresses.resolved(name):
            return name
        return _connection(one)[1]  # a name that only ssh knows
    return _connection(next(each for each in all_of_them if not each.host.is_here))[0]


def _connection(one: Supervised) -> tuple[str, str]:
    """Return the address that ssh has connected from, and the one it has connected to."""
    words = str(one.greeting["connection"]).split()
    if len(words) != 4:
        raise HostError(f"{one.host.name}: its ssh does not tell which address it was reached at")
    return words[0], words[2]
