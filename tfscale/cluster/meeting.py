"""A meeting of workers before TensorFlow starts its servers, which wait without a message.

Each worker listens at its own address, as its server will later, and connects to all others. On
each connection both sides send who they are and their list of workers. A worker is ready when it
has connected to all others and all others have connected to it; it tells them so. When all are
ready, all close their sockets and continue. A waiting worker logs which workers are missing. A
worker that gives up tells all workers that it can reach, including those that it has not met yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfscale.cluster import addresses, greeting
from tfscale.cluster.greeting import Hello, NoWorker, Worker
from tfscale.cluster.threads import outcome_of

_log = logging.getLogger("tfscale")

FIRST_WORD, EACH = 10.0, 30.0  # seconds after which a waiting worker logs, and logs again
_CONNECT = 5.0  # seconds
_ANSWER = 5.0
_PAUSES = (0.2, 5.0)  # seconds between two calls: the first, and the longest
_GRACE = 1.0  # seconds in which a restarted worker may take its own place
_LAST_WORDS = 1.0
_NAMED = 8  # largest number of workers in a message

_CHECK = (
    "Check that it was started and still runs, that its TF_CONFIG has the same list of workers and "
    "its own index, and that its address can be reached from here: host name, port, firewall"
)


class JoinError(RuntimeError):
    """Raised if workers have not all met; the message says who is missing, or what is wrong."""


def meet(
    workers: Sequence[Worker],
    me: int,
    timeout: float,
    *,
    share_port: bool = False,
    say: Callable[[str], None] = _log.warning,
) -> None:
    """Wait until all workers are here; raise ``JoinError`` if they do not come.

    Args:
        workers: all workers, in the same order everywhere.
        me: index of this worker.
        timeout: number of seconds to wait for them.
        share_port: whether a socket that does not listen may hold this worker's port.
        say: called now and then with a line about missing workers.
    """
    meeting = _Meeting(workers, me, timeout, share_port, say)
    outcome_of(meeting.run(), "tfscale-meeting")


@contextlib.contextmanager
def narrated(story: str, say: Callable[[str], None] = _log.warning) -> Iterator[None]:
    """Log now and then what the code in this context is waiting for."""
    over = threading.Event()

    def tell() -> None:
        seconds = FIRST_WORD
        while not over.wait(FIRST_WORD if seconds == FIRST_WORD else EACH):
            say(f"{story}; {seconds:.0f} s by now")
            seconds += EACH

    threading.Thread(target=tell, name="tfscale-narrator", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def unreachable(workers: Sequence[Worker]) -> str:
    """Describe which workers cannot be reached, and why."""
    troubles = []
    for worker in workers:
        try:
            socket.create_connection(addresses.split(worker.address), timeout=1.0).close()
        except OSError as error:
            troubles.append(f"{worker}: {addresses.words(error)}")
    return "; ".join(troubles) or "all of their ports answer"


@dataclass(eq=False)
class _Link:
    """A connection to a process that has introduced itself."""

    hello: Hello
    called: bool  # whether this worker called that process, or that process called this worker
    writer: asyncio.StreamWriter


@dataclass
class _Peer:
    """The state of one of the workers."""

    worker: Worker
    links: list[_Link] = field(default_factory=list)
    trouble: str = "not called yet"  # or the reason why a call failed
    ready: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set when it may answer

    def linked(self, called: bool) -> bool:
        return any(link.called == called for link in self.links)

    @property
    def met(self) -> bool:
        return self.linked(True) and self.linked(False)

    def state(self) -> str:
        if self.met:
            return f"{self.worker} (is there, and waits for others)"
        if self.linked(True):
            return f"{self.worker} (it answers, but has not connected to this worker)"
        if self.linked(False):
            return f"{self.worker} (it has connected, but cannot be reached: {self.trouble})"
        return f"{self.worker} ({self.trouble})"


class _Meeting:
    def __init__(
        self,
        workers: Sequence[Worker],
        me: int,
        timeout: float,
        share_port: bool,
        say: Callable[[str], None],
    ) -> None:
        self._hello = Hello(
            me,
            f"process {os.getpid()} on {socket.gethostname()}",
            secrets.token_hex(8),
            list(workers),
        )
        self._introduction = {"tfscale": greeting.PROTOCOL, **self._hello._asdict()}
        self._me = me
        self._timeout = timeout
        self._share_port = share_port
        self._say = say
        self._own_trouble = ""

    async def run(self) -> None:
        self._everyone = [_Peer(worker) for worker in self._hello.workers]
        self._others = [p for i, p in enumerate(self._everyone) if i != self._me]
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server: asyncio.AbstractServer | None = None
        tasks = [asyncio.create_task(one) for one in (self._listen(), self._tell())]
        tasks += [asyncio.create_task(self._call(peer)) for peer in self._others]
        self._look()
        try:
            await self._end
        except JoinError as error:
            await self._give_up({"gave up": str(error)})
            raise
        finally:
            for task in tasks:
                task.cancel()
            await self._close()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        writers = [link.writer for peer in self._everyone for link in peer.links]
        for writer in writers:
            writer.close()
        if writers:
            await asyncio.wait(
                [asyncio.create_task(addresses.closed(writer)) for writer in writers],
                timeout=_LAST_WORDS,
            )

    # -- who is there

    def _look(self) -> None:
        """Check whether all are there, after a change."""
        if self._end.done():
            return
        if self._server is not None and all(peer.met for peer in self._others):
            self._ready()
        if self._is_ready and all(peer.ready for peer in self._others):
            self._end.set_result(None)

    _is_ready = False

    def _ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._to_all({"ready": True})

    def _to_all(self, message: dict[str, Any]) -> None:
        for peer in self._everyone:
            for link in peer.links:
                greeting.write(link.writer, message)

    async def _give_up(self, message: dict[str, Any]) -> None:
        """Send an error to all; call workers that this one has not met: they would wait for it."""
        self._to_all(message)
        unmet = [self._call_to_tell(peer, message) for peer in self._others if not peer.links]
        with contextlib.suppress(asyncio.TimeoutError):
            await addresses.within(_LAST_WORDS, asyncio.gather(*unmet))

    async def _call_to_tell(self, peer: _Peer, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, NoWorker):
            host, port = addresses.split(peer.worker.address)
            reader, writer = await asyncio.open_connection(host, port, limit=greeting.LONGEST)
            try:
                greeting.write(writer, self._introduction)
                greeting.write(writer, message)
                # a connection that is closed unread may lose the message
                while await greeting.line(reader):
                    pass
            finally:
                writer.close()

    def _fail(self, message: str) -> None:
        if not self._end.done():
            self._end.set_exception(JoinError(message))

    # -- connections

    async def _listen(self) -> None:
        own = self._everyone[self._me]
        host, port = addresses.split(own.worker.address)
        while self._server is None:
            try:
                if self._share_port:
                    await addresses.refuse_listener(host, port)
                self._server = await addresses.listen(self._called, host, port, self._share_port)
            except OSError as error:
                self._own_trouble = f"its port cannot be opened: {addresses.words(error)}"
                await self._call_once(own)
                await asyncio.sleep(_PAUSES[0])
        self._own_trouble = ""
        self._look()
        if addresses.is_number(host) and addresses.listens_everywhere(self._server):
            self._own_trouble = f"{host} is not an address of this machine"
        await self._call(own)  # another program may be there

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(NoWorker, OSError, asyncio.TimeoutError):
            await self._converse(reader, writer, None)

    async def _call(self, peer: _Peer) -> None:
        """Call a worker again and again, also if the connection ends."""
        pause, longest = _PAUSES
        while True:
            peer.news.clear()
            await self._call_once(peer)
            with contextlib.suppress(asyncio.TimeoutError):
                await addresses.within(pause, peer.news.wait())
            pause = min(2 * pause, longest)

    async def _call_once(self, peer: _Peer) -> None:
        writer = None
        try:
            host, port = addresses.split(peer.worker.address)
            opening = asyncio.open_connection(host, port, limit=greeting.LONGEST)
            reader, writer = await addresses.within(_CONNECT, opening)
            await self._converse(reader, writer, peer)
            peer.trouble = "it was there, but has ended or was cut off"
        except asyncio.TimeoutError:
            peer.trouble = (
                f"no answer within {_CONNECT:.0f} s"
                if writer is None
                else "it accepts connections, but sends nothing"
            )
        except NoWorker as problem:
            peer.trouble = str(problem)
        except OSError as error:
            peer.trouble = addresses.words(error)
        finally:
            if writer is not None:
                writer.close()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, whom: _Peer | None
    ) -> None:
        """Talk on a connection until it ends.

        ``whom`` is the worker that this one has called; None if this worker was called.
        """
        greeting.write(writer, self._introduction)
        hello = greeting.read_hello(await addresses.within(_ANSWER, greeting.line(reader)))
        if hello.start == self._hello.start:  # the address leads back to this process, as it should
            self._own_trouble = ""
            return
        problem = self._problem(hello, whom)
        if problem:
            greeting.write(writer, {"gave up": problem})
            return self._fail(problem)
        peer = self._everyone[hello.place]
        link = _Link(hello, whom is not None, writer)
        peer.links.append(link)
        peer.news.set()
        if self._is_ready:
            greeting.write(writer, {"ready": True})
        asyncio.get_running_loop().call_later(_GRACE, self._refuse_duplicates, peer)
        try:
            self._look()
            while data := await greeting.line(reader):
                self._heed(peer, data)
        finally:
            if not self._end.done():
                peer.links.remove(link)

    def _heed(self, peer: _Peer, data: bytes) -> None:
        message = greeting.parsed(data)
        if message.get("ready") is True:
            peer.ready = True
            self._look()
        elif isinstance(message.get("gave up"), str):
            self._fail(f"{peer.worker} has given up: {greeting.printable(message['gave up'])}")

    # -- what is wrong

    def _problem(self, hello: Hello, whom: _Peer | None) -> str:
        """Return why the process on this connection is not the expected worker; empty if it is."""
        if hello.workers != self._hello.workers:
            return self._other_list(hello)
        if hello.place == self._me:
            return self._duplicate_error(self._hello, hello)
        its = self._everyone[hello.place]
        if whom is None or whom is its:
            return ""
        return (
            f"at the address of {whom.worker} runs {its.worker.name} ({hello.process}). "
            "Give each worker the index of its own address in TF_CONFIG."
        )

    def _other_list(self, hello: Hello) -> str:
        theirs, own = hello.workers, self._hello.workers
        if len(theirs) != len(own):
            what = f"it has {len(theirs)} workers, here there are {len(own)}"
        else:
            at = next(i for i, pair in enumerate(zip(theirs, own)) if pair[0] != pair[1])
            what = f"it has {theirs[at]}, where this one has {own[at]}"
        return (
            f"{theirs[hello.place]} ({hello.process}) has another list of workers than "
            f"{own[self._me]} ({self._hello.process}): {what}. "
            "Give all workers the same cluster in TF_CONFIG, in the same order."
        )

    def _duplicate_error(self, one: Hello, other: Hello) -> str:
        return (
            f"two processes were started as {self._everyone[one.place].worker}: "
            f"{one.process}, and {other.process}. "
            "Start each worker once, each with its own index in TF_CONFIG."
        )

    def _refuse_duplicates(self, peer: _Peer) -> None:
        found = {link.hello.start: link.hello for link in peer.links}
        if len(found) > 1 and not self._end.done():
            one, other, *_ = found.values()
            self._fail(self._duplicate_error(one, other))

    # -- what is told

    async def _tell(self) -> None:
        """Log now and then which workers are missing, and fail with that at the end."""
        began = asyncio.get_running_loop().time()
        at = FIRST_WORD
        while at < self._timeout:
            await asyncio.sleep(began + at - asyncio.get_running_loop().time())
            self._say(self._story(at))
            at += EACH
        await asyncio.sleep(began + self._timeout - asyncio.get_running_loop().time())
        self._fail(f"{self._story(self._timeout)}. {_CHECK} (join_timeout={self._timeout:g}).")

    def _story(self, seconds: float) -> str:
        missing = [peer for peer in self._others if not peer.met]
        missing = missing or [peer for peer in self._others if not peer.ready]
        named = [peer.state() for peer in missing[:_NAMED]]
        if len(missing) > _NAMED:
            named.append(f"{len(missing) - _NAMED} more")
        own = self._everyone[self._me]
        trouble = f" [{self._own_trouble}; {own.trouble}]" if self._own_trouble else ""
        return (
            f"{own.worker}{trouble} has waited {seconds:.0f} s for "
            f"{', '.join(named) or 'its own port'}"
        )
