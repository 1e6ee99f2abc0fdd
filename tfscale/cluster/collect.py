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
import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tfscale.cluster import addresses, config, greeting, meeting
from tfscale.cluster.greeting import NoWorker
from tfscale.cluster.meeting import JoinError
from tfscale.cluster.threads import outcome_of

_log = logging.getLogger("tfscale")

_TRIED = 16  # number of ports: the master's, and those after it
_LONGEST = 64 << 10  # bytes of a worker's message
_CONNECT, _ANSWER = 5.0, 5.0  # seconds
_SILENCE = 1.0  # seconds after which a silent listener is not worker 0
_PAUSES = (0.2, 2.0)  # seconds between two rounds of calls: the first, and the longest
_GRACE = 1.0  # seconds in which a restarted worker may take its own place
_NEWS = 1.0  # seconds between two messages about missing workers
_LAST_WORDS = 5.0
_NAMED = 8  # largest number of workers in a message

_CHECK = (
    "Check that all workers were started and still run, that MASTER_ADDR and MASTER_PORT are the "
    "same for all and lead to worker 0's host, and that it can be reached there: host name, ports, "
    "firewall"
)


def collect(*arguments: Any, **more: Any) -> list[list[str]]:
    """Run ``collected`` for programs without an event loop."""
    return outcome_of(collected(*arguments, **more), "tfscale-collect")


async def collected(
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
    process = f"process {os.getpid()} on {socket.gethostname()}"
    me = _Hello(who, index, count, tuple(ports), process)
    return await _run(master, me, identity, timeout, say)


@dataclass(frozen=True)
class _Hello:
    """The message in which a worker or a node introduces itself."""

    who: str
    index: int
    count: int  # number of all workers
    ports: tuple[int, ...]
    process: str  # for people to read

    def __str__(self) -> str:
        return f"{self.who} {self.index}"


async def _run(
    master: tuple[str, int],
    me: _Hello,
    identity: str,
    timeout: float,
    say: Callable[[str], None],
) -> list[list[str]]:
    end: asyncio.Future[list[list[str]]] = asyncio.get_running_loop().create_future()
    caller = _Caller(master, me, identity, end)
    host = _Host(master, me, identity, end) if me.index == 0 else None
    tasks = [asyncio.create_task(one) for one in (caller.run(), _tell(caller, host, timeout, say))]
    if host:
        tasks += [asyncio.create_task(one) for one in (host.listen(), host.spread_news())]
    try:
        return await end
    except JoinError as error:
        if host:
            await host.give_up(str(error))
        raise
    finally:
        for task in tasks:
            task.cancel()
        if host:
            await host.close()


def _ports(master: tuple[str, int]) -> range:
    return range(master[1], min(master[1] + _TRIED, 65536))


# ---------------------------------------------------------------------- all workers


class _Caller:
    """The client that calls worker 0, until it sends the list."""

    def __init__(
        self,
        master: tuple[str, int],
        me: _Hello,
        identity: str,
        end: asyncio.Future[list[list[str]]],
    ) -> None:
        self.me = me
        self._master = master
        self._identity = identity
        self._end = end
        self._missing = ""  # missing workers, as worker 0 reports them
        self._troubles: dict[int, str] = {}  # by port

    async def run(self) -> None:
        pause, longest = _PAUSES
        while True:
            for port in _ports(self._master):
                if not await self._call(port):
                    break
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _call(self, port: int) -> bool:
        """Call worker 0 at a port; return whether it may be at the next port."""
        writer = None
        try:
            opening = asyncio.open_connection(self._master[0], port, limit=greeting.LONGEST)
            reader, writer = await addresses.within(_CONNECT, opening)
            self._check(await addresses.within(_SILENCE, greeting.line(reader)))
            self._troubles = {port: "it is there, and waits for others"}
            greeting.write(writer, asdict(self.me))
            while data := await greeting.line(reader):
                self._heed(greeting.parsed(data))
            self._troubles = {port: "it was there, but has ended or was cut off"}
            return False
        except asyncio.TimeoutError:
            if writer is None:  # the other ports of that host will not answer, either
                self._troubles = {port: f"no answer within {_CONNECT:.0f} s"}
                return False
            self._troubles[port] = "it accepts connections, but sends nothing"
        except NoWorker as problem:
            self._troubles[port] = str(problem)
        except OSError as error:
            self._troubles[port] = addresses.words(error)
        finally:
            self._missing = ""
            if writer is not None:
                writer.close()
        return True

    def _check(self, data: bytes) -> None:
        """Raise if the listener is not worker 0 of this job."""
        found = greeting.parsed(data)
        if "tfscale" not in found:
            raise NoWorker(greeting.SILENT)
        if found["tfscale"] != greeting.PROTOCOL:
            raise NoWorker(greeting.OTHER_VERSION)
        if found.get("collects") != self._identity:
            raise NoWorker("workers of another job meet there")

    def _heed(self, message: dict[str, Any]) -> None:
        if isinstance(message.get("missing"), str):
            self._missing = greeting.printable(message["missing"])
        if isinstance(message.get("gave up"), str):
            self.fail(f"{self._host} has given up: {greeting.printable(message['gave up'])}")
        workers = message.get("workers")
        if self._are_all(workers) and not self._end.done():
            self._end.set_result(list(workers or []))

    def _are_all(self, workers: Any) -> bool:
        return (
            isinstance(workers, list)
            and len(workers) == self.me.count
            and all(isinstance(each, list) for each in workers)
            and all(isinstance(o, str) and config.is_address(o) for each in workers for o in each)
        )

    def fail(self, message: str) -> None:
        if not self._end.done():
            self._end.set_exception(JoinError(message))

    @property
    def _host(self) -> str:
        return f"{self.me.who} 0 at {addresses.joined(*self._master)}"

    def waits_for(self) -> str:
        if self._missing:
            return f"{self._missing} (not heard of at {addresses.joined(*self._master)})"
        return f"{self._host} ({self._trouble() or 'not called yet'})"

    def _trouble(self) -> str:
        nothing = addresses.NOTHING_LISTENS
        told = [f"port {port}: {why}" for port, why in self._troubles.items() if why != nothing]
        if len(told) < len(self._troubles):
            others = "the other ports" if told else f"port {self._master[1]} and those"
            told.append(f"nothing listens at {others} up to {_ports(self._master)[-1]}")
        return "; ".join(told)


async def _tell(
    caller: _Caller, host: _Host | None, timeout: float, say: Callable[[str], None]
) -> None:
    """Log now and then which workers are missing, and fail with that at the end."""
    clock = asyncio.get_running_loop().time
    began, at = clock(), meeting.FIRST_WORD

    def story(seconds: float) -> str:
        trouble = f" [{host.trouble}]" if host and host.trouble else ""
        who = f"{caller.me.who} {caller.me.index}{trouble}"
        return f"{who} has waited {seconds:.0f} s for {caller.waits_for()}"

    while at < timeout:
        await asyncio.sleep(began + at - clock())
        say(story(at))
        at += meeting.EACH
    await asyncio.sleep(began + timeout - clock())
    caller.fail(f"{story(timeout)}. {_CHECK} (join_timeout={timeout:g}).")


# ---------------------------------------------------------------------- worker 0


@dataclass(eq=False)
class _Link:
    """A connection to a worker."""

    hello: _Hello
    writer: asyncio.StreamWriter

    def end(self, which: str) -> str:
        return str(self.writer.get_extra_info(which)[0])


class _Host:
    """The server of worker 0, which listens until all workers have called."""

    def __init__(
        self,
        master: tuple[str, int],
        me: _Hello,
        identity: str,
        end: asyncio.Future[list[list[str]]],
    ) -> None:
        self.trouble = ""
        self._master = master
        self._me = me
        self._introduction = {"tfscale": greeting.PROTOCOL, "collects": identity}
        self._end = end
        self._links: dict[int, list[_Link]] = {index: [] for index in range(me.count)}
        # connections that have introduced themselves
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.AbstractServer | None = None
        self._wrong = ""  # the error that worker 0 has found
        self._told = ""  # missing workers, as last sent to all

    async def listen(self) -> None:
        """Listen at the first free port."""
        while True:
            for port in _ports(self._master):
                try:
                    self._server = await addresses.listen(
                        self._called, self._master[0], port, False, _LONGEST
                    )
                except OSError as error:
                    why = addresses.words(error)
                    self.trouble = f"no port from {self._master[1]} on can be opened: {why}"
                else:
                    self.trouble = ""
                    return
            await asyncio.sleep(_PAUSES[0])

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(NoWorker, OSError, asyncio.TimeoutError):
            greeting.write(writer, self._introduction)
            hello = _read(await addresses.within(_ANSWER, greeting.line(reader)))
            self._writers.add(writer)
            await self._heed(_Link(hello, writer), reader)
        self._writers.discard(writer)

    async def _heed(self, link: _Link, reader: asyncio.StreamReader) -> None:
        """Handle a connection until it ends."""
        hello = link.hello
        if hello.count != self._me.count:
            self._fail(
                f"{hello} ({hello.process}) was started as one of {hello.count}, "
                f"{self._me} ({self._me.process}) as one of {self._me.count}. "
                f"Tell all {hello.who}s the same number of {hello.who}s."
            )
        if self._wrong:
            return greeting.write(link.writer, {"gave up": self._wrong})
        if hello.index >= hello.count:
            raise NoWorker(greeting.SILENT)
        links = self._links[hello.index]
        links.append(link)
        self._told = ""  # this worker does not know yet
        asyncio.get_running_loop().call_later(_GRACE, self._refuse_duplicates, hello.index)
        try:
            self._look()
            while await greeting.line(reader):
                pass
        finally:
            links.remove(link)
            self._look()  # one of two may have left

    def _look(self) -> None:
        """Check whether all are there, after a change."""
        if all(len(links) == 1 for links in self._links.values()):
            self.to_all({"workers": self._addresses()})

    def _addresses(self) -> list[list[str]]:
        """Return the addresses of all workers, in order.

        A loopback address works on this host only. Other hosts reach such a worker at the address
        that they called; if no other host has called, the IPv4 loopback serves.
        """
        links = [links[0] for links in self._links.values()]
        called = [link.end("sockname") for link in links]
        here = next((host for host in called if not _is_loopback(host)), "127.0.0.1")
        hosts = [link.end("peername") for link in links]
        return [
            [addresses.joined(here if _is_loopback(host) else host, p) for p in link.hello.ports]
            for link, host in zip(links, hosts)
        ]

    def _refuse_duplicates(self, index: int) -> None:
        if len(self._links[index]) > 1:
            one, other, *_ = (link.hello.process for link in self._links[index])
            self._fail(
                f"two processes were started as {self._me.who} {index}: {one}, and {other}. "
                f"Start each {self._me.who} once, each with its own index."
            )

    def _fail(self, message: str) -> None:
        if not self._end.done():
            self._wrong = message
            self._end.set_exception(JoinError(message))

    async def give_up(self, message: str) -> None:
        """Send an error to all; wait for workers that have not called yet, to tell them, too."""
        self.to_all({"gave up": message})
        if self._wrong and not all(self._links.values()):
            await asyncio.sleep(_LAST_WORDS)

    async def spread_news(self) -> None:
        while True:
            missing = [
                f"{self._me.who} {index}" for index, links in self._links.items() if not links
            ]
            more = [f"{len(missing) - _NAMED} more"] if len(missing) > _NAMED else []
            news = ", ".join(missing[:_NAMED] + more)
            if news != self._told:
                self.to_all({"missing": news})
                self._told = news
            await asyncio.sleep(_NEWS)

    def to_all(self, message: dict[str, Any]) -> None:
        for writer in self._writers:
            greeting.write(writer, message)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        closing = [asyncio.create_task(addresses.closed(writer)) for writer in self._writers]
        for writer in self._writers:
            writer.close()
        if closing:
            await asyncio.wait(closing, timeout=_LAST_WORDS)


def _read(data: bytes) -> _Hello:
    """Parse an introduction, which may come from any program."""
    found = greeting.parsed(data)
    who, index, count, ports, process = (
        found.get(name) for name in ("who", "index", "count", "ports", "process")
    )
    if type(index) is not int or type(count) is not int or index < 0:
        raise NoWorker(greeting.SILENT)
    if not isinstance(ports, list) or not ports or not all(map(_is_port, ports)):
        raise NoWorker(greeting.SILENT)
    if who not in ("worker", "node") or not isinstance(process, str):
        raise NoWorker(greeting.SILENT)
    return _Hello(who, index, count, tuple(ports), greeting.printable(process))


def _is_port(found: Any) -> bool:
    return type(found) is int and 0 < found < 65536


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
