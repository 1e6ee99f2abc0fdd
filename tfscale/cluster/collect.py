"""Exchange of addresses through worker 0, for workers whose launcher gives them no addresses.

Launchers that are started by hand, one on each node, use it, too; each has the ports of several
workers.

Worker 0 listens at the master's port, or at one of the next ports if another program has that port,
as torchrun itself often has. All workers call there, including worker 0. The listener speaks first,
so a program that has nothing to do with this never receives a byte. Each worker sends its index and
its ports; its host is the source of its call. When all have called, worker 0 sends the list to all.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from tfscale.cluster import addresses, connections
from tfscale.cluster.connections import CUT_OFF, NO_ANSWER, Connection, Message, NoWorker, printable
from tfscale.cluster.gathering import Arrival, Gathering, list_names, this_process
from tfscale.cluster.threads import run_in_thread

_log = logging.getLogger("tfscale")

_TRIED = 16  # number of ports: the master's, and those after it
_LONGEST = 64 << 10  # bytes of a worker's message
_SILENCE = 1.0  # seconds after which a silent listener is not worker 0
_PAUSES = (0.2, 2.0)  # seconds between two rounds of calls: the first, and the longest
_BETWEEN_NEWS = 1.0  # seconds between two messages about missing workers
_TO_TELL = 5.0  # seconds in which workers that have not called yet may hear of a failure


def collect(*arguments: Any, **more: Any) -> list[list[str]]:
    """Run ``collect_addresses`` for programs without an event loop."""
    return run_in_thread(collect_addresses(*arguments, **more), "tfscale-collect")


async def collect_addresses(
    master: tuple[str, int],
    index: int,
    count: int,
    ports: Sequence[int],
    identity: str,
    timeout: float,
    *,
    who: str = "worker",
    say: Callable[[str], None] = _log.warning,
) -> list[list[str]]:
    """Return the addresses "host:port" of all, in order; raise ``JoinError`` if some are missing.

    Args:
        master: the first worker's host, and the first port to try there.
        index: index of this worker.
        count: number of workers.
        ports: ports of this worker's server, or of a node's workers.
        identity: a text that is common to this job and unique to it.
        timeout: number of seconds to wait for all.
        who: "worker", or "node".
        say: called now and then with a line about missing workers.
    """
    me = Hello(who, index, count, tuple(ports), this_process())
    kind = _FirstWorker if index == 0 else _Worker
    return await kind(master, me, identity, timeout, say).run()


@dataclass(frozen=True)
class Hello:
    """The message in which a worker or a node introduces itself."""

    who: str
    index: int
    count: int  # number of all workers
    ports: tuple[int, ...]
    process: str  # for people to read

    def __str__(self) -> str:
        return f"{self.who} {self.index}"


def _read_hello(greeting: Message) -> Hello:
    who, index, count, ports, process = connections.fields(
        greeting, who=str, index=int, count=int, ports=list, process=str
    )
    if who not in ("worker", "node") or index < 0 or not ports or not all(map(_is_port, ports)):
        raise NoWorker
    return Hello(who, index, count, tuple(ports), printable(process))


def _is_port(found: Any) -> bool:
    return type(found) is int and 0 < found < 65536


class _Worker(Gathering[list[list[str]]]):
    """A worker that calls worker 0 until it sends the list."""

    advice = (
        "Check that all workers were started and still run, that MASTER_ADDR and MASTER_PORT are "
        "the same for all and lead to worker 0's host, and that it can be reached there: host "
        "name, ports, firewall"
    )

    def __init__(
        self,
        master: tuple[str, int],
        me: Hello,
        identity: str,
        timeout: float,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(timeout, say)
        self.start_once = f"Start each {me.who} once, each with its own index."
        self._me = me
        self._host, self._port = master
        self._ports = range(self._port, min(self._port + _TRIED, 65536))
        self._identity = identity
        self._first = f"{me.who} 0 at {addresses.join(*master)}"
        self._not_heard_of = ""  # missing workers, as worker 0 reports them
        self._troubles: dict[int, str] = {}  # by port

    def _activities(self) -> list[Coroutine[Any, Any, None]]:
        return [self._call()]

    def _name(self) -> str:
        return str(self._me)

    def _missing(self) -> str:
        if self._not_heard_of:
            at = addresses.join(self._host, self._port)
            return f"{self._not_heard_of} (not heard of at {at})"
        return f"{self._first} ({self._trouble() or 'not called yet'})"

    def _trouble(self) -> str:
        nothing = addresses.NOTHING_LISTENS
        words = [f"port {port}: {why}" for port, why in self._troubles.items() if why != nothing]
        if len(words) < len(self._troubles):
            others = "the other ports" if words else f"port {self._port} and those"
            words.append(f"nothing listens at {others} up to {self._ports[-1]}")
        return "; ".join(words)

    async def _call(self) -> None:
        """Call worker 0 at one port after the other, again and again."""
        pause, longest = _PAUSES
        while True:
            for port in self._ports:
                trouble = await connections.call(
                    self._host, port, functools.partial(self._converse, port)
                )
                self._not_heard_of = ""
                if trouble in (CUT_OFF, NO_ANSWER):  # it is not at another port
                    self._troubles = {port: trouble}
                    break
                self._troubles[port] = trouble
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _converse(self, port: int, connection: Connection) -> None:
        greeting = await connection.receive_greeting(_SILENCE)
        connections.check_version(greeting)
        if greeting.get("collects") != self._identity:
            raise NoWorker("workers of another job meet there")
        self._troubles = {port: "it is there, and waits for others"}
        connection.send(asdict(self._me))
        while message := await connection.receive():
            self._fail_if_other_has(message, self._first)
            if isinstance(missing := message.get("missing"), str):
                self._not_heard_of = printable(missing)
            if self._are_all(workers := message.get("workers")):
                self._succeed(workers)

    def _are_all(self, workers: Any) -> TypeGuard[list[list[str]]]:
        if not isinstance(workers, list) or len(workers) != self._me.count:
            return False
        return all(
            isinstance(each, list) and all(map(addresses.is_address, each)) for each in workers
        )


@dataclass(eq=False)
class _Arrival(Arrival):
    ports: tuple[int, ...]


class _FirstWorker(_Worker):
    """Worker 0, which also listens until all workers have called, itself included."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._own_trouble = ""
        self._has_tried = asyncio.Event()  # to listen
        self._introduction = {"tfscale": connections.PROTOCOL, "collects": self._identity}
        self._arrivals: dict[int, list[_Arrival]] = {i: [] for i in range(self._me.count)}
        self._refusal = ""  # the error that this worker has found
        self._last_news = ""  # missing workers, as last sent to all

    def _activities(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._activities(), self._listen(), self._spread_news()]

    def _name(self) -> str:
        return f"{self._me} [{self._own_trouble}]" if self._own_trouble else str(self._me)

    async def _listen(self) -> None:
        """Listen at the first free port."""
        while self._server is None:
            for port in self._ports:
                try:
                    self._server = await connections.listen(
                        self._answer, self._host, port, _LONGEST
                    )
                    self._own_trouble = ""
                    return self._has_tried.set()
                except OSError as error:
                    why = addresses.describe_error(error)
                    self._own_trouble = f"no port from {self._port} on can be opened: {why}"
            self._has_tried.set()
            await asyncio.sleep(_PAUSES[0])

    async def _call(self) -> None:
        """Call once this worker listens: a second worker 0 at an earlier port listens by then, too.

        Two that called before would each find nobody, and then themselves.
        """
        await self._has_tried.wait()
        await super()._call()

    async def _answer(self, connection: Connection) -> None:
        """Talk to a worker until its connection ends."""
        connection.send(self._introduction)
        hello = _read_hello(await connection.receive_greeting(connections.ANSWER))
        if hello.count != self._me.count:
            self._refuse(
                f"{hello} ({hello.process}) was started as one of {hello.count}, "
                f"{self._me} ({self._me.process}) as one of {self._me.count}. "
                f"Tell all {hello.who}s the same number of {hello.who}s."
            )
        if self._refusal:
            return connection.send({"gave up": self._refusal})
        if hello.index >= hello.count:
            raise NoWorker
        arrival = _Arrival(connection, hello.process, connection, hello.ports)
        try:
            with self._present(self._arrivals[hello.index], arrival, str(hello)):
                self._last_news = ""  # this worker does not know yet
                self._check_presence()
                while await connection.receive():
                    pass
        finally:
            self._check_presence()  # one of two may have left

    def _check_presence(self) -> None:
        """Send the list if all are there, after a change."""
        if all(len(arrivals) == 1 for arrivals in self._arrivals.values()):
            every = [arrival for (arrival,) in self._arrivals.values()]
            self._send_to_all({"workers": addresses_of(every)})

    def _refuse(self, message: str) -> None:
        self._refusal = self._refusal or message
        self._fail(message)

    async def _give_up(self, message: Message) -> None:
        """Send an error to all; wait for workers that have not called yet, to tell them, too."""
        self._send_to_all(message)
        if self._refusal and not all(self._arrivals.values()):
            await asyncio.sleep(_TO_TELL)

    async def _spread_news(self) -> None:
        while True:
            missing = [i for i, arrivals in self._arrivals.items() if not arrivals]
            news = list_names([f"{self._me.who} {index}" for index in missing])
            if news != self._last_news:
                self._send_to_all({"missing": news})
                self._last_news = news
            await asyncio.sleep(_BETWEEN_NEWS)


def addresses_of(arrivals: Sequence[_Arrival]) -> list[list[str]]:
    """Return the addresses of workers that have called, in their order.

    A loopback address works on this host only. Other hosts reach such a worker at the address that
    they called; if no other host has called, the IPv4 loopback serves.
    """
    called = [arrival.connection.own_host for arrival in arrivals]
    here = next((host for host in called if not _is_loopback(host)), "127.0.0.1")
    hosts = [arrival.connection.other_host for arrival in arrivals]
    return [
        [addresses.join(here if _is_loopback(host) else host, port) for port in arrival.ports]
        for arrival, host in zip(arrivals, hosts)
    ]


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
