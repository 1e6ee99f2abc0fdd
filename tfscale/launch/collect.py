"""Workers whose launcher tells them no addresses tell each other theirs, through worker 0.

So do launchers that are started by hand, one on each node; each has the ports of several workers.

Worker 0 listens at the master's port, or at one of the next where another program has that port,
as torchrun itself often has. All call there, worker 0 itself, too. Whoever listens speaks first, so
that a program that has nothing to do with this is never sent a byte. Each worker sends its index
and its ports; its host is where its call comes from. When all have called, worker 0 sends all the
list.
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

from tfscale.launch import addresses, config, greeting, meeting
from tfscale.launch.greeting import NoWorker
from tfscale.launch.meeting import JoinError
from tfscale.launch.threads import outcome_of

_log = logging.getLogger("tfscale")

_TRIED = 16  # the master's port, and those after it
_LONGEST = 64 << 10  # bytes of what a worker says
_CONNECT, _ANSWER = 5.0, 5.0  # seconds
_SILENCE = 1.0  # seconds after which whoever has not spoken is not worker 0
_PAUSES = (0.2, 2.0)  # seconds between two rounds of calls: the first, and the longest
_GRACE = 1.0  # seconds in which a worker that was started again may take its own place
_NEWS = 1.0  # seconds between two words on who is missing
_LAST_WORDS = 5.0
_NAMED = 8  # workers in a message at most

_CHECK = (
    "Check that all workers were started and still run, that MASTER_ADDR and MASTER_PORT are the "
    "same for all and lead to worker 0's host, and that it can be reached there: host name, ports, "
    "firewall"
)


def collect(*arguments: Any, **more: Any) -> list[list[str]]:
    """``collected``, for programs without an event loop."""
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
    """The addresses, "host:port", of all in their order; ``JoinError`` if some are missing.

    Args:
        master: the first one's host, and the first port to try there.
        index: which one this is.
        count: how many there are.
        ports: of this worker's server; or of those of a node's workers.
        identity: a text that those of this job share, and others do not.
        timeout: how many seconds to wait for all.
        who: "worker", or "node".
        say: called now and then with a line about who is missing.
    """
    process = f"process {os.getpid()} on {socket.gethostname()}"
    me = _Hello(who, index, count, tuple(ports), process)
    return await _run(master, me, identity, timeout, say)


@dataclass(frozen=True)
class _Hello:
    """What a worker or a node says of itself."""

    who: str
    index: int
    count: int  # of all workers
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
    """Calls worker 0, until it sends the list."""

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
        self._missing = ""  # as worker 0 says
        self._troubles: dict[int, str] = {}  # with each port

    async def run(self) -> None:
        pause, longest = _PAUSES
        while True:
            for port in _ports(self._master):
                if not await self._call(port):
                    break
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _call(self, port: int) -> bool:
        """Whether worker 0 may be found at the next port."""
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
            if writer is None:  # nor will the other ports of that host answer
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
        """Whether worker 0 of this job speaks."""
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
    """Log now and then who is missing, and fail with that at the end."""
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
    """Listens, until all have called."""

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
        self._writers: set[asyncio.StreamWriter] = set()  # of whoever has said hello
        self._server: asyncio.AbstractServer | None = None
        self._wrong = ""  # what worker 0 has found to be wrong
        self._told = ""  # to all who have called: who is missing

    async def listen(self) -> None:
        """At the first port that is free."""
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
        """Until the connection ends."""
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
        self._told = ""  # not yet to this one
        asyncio.get_running_loop().call_later(_GRACE, self._refuse_two_of, hello.index)
        try:
            self._look()
            while await greeting.line(reader):
                pass
        finally:
            links.remove(link)
            self._look()  # one of two may have gone

    def _look(self) -> None:
        """Something has changed: perhaps all are there."""
        if all(len(links) == 1 for links in self._links.values()):
            self.to_all({"workers": self._addresses()})

    def _addresses(self) -> list[list[str]]:
        """A loopback address is of use on this host alone; others reach it where they have called,
        and IPv4's serves if nobody else has called.
        """
        links = [links[0] for links in self._links.values()]
        called = [link.end("sockname") for link in links]
        here = next((host for host in called if not _is_loopback(host)), "127.0.0.1")
        hosts = [link.end("peername") for link in links]
        return [
            [addresses.joined(here if _is_loopback(host) else host, p) for p in link.hello.ports]
            for link, host in zip(links, hosts)
        ]

    def _refuse_two_of(self, index: int) -> None:
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
        """Tell all; what is wrong also those that have not called yet, and would wait for it."""
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
    """Anybody may have sent anything."""
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
