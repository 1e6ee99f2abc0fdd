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
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfscale.cluster import addresses, connections
from tfscale.cluster.connections import Connection, Message, NoWorker, printable
from tfscale.cluster.gathering import Arrival, Gathering, JoinError, list_names, this_process
from tfscale.cluster.threads import run_in_thread

__all__ = ["JoinError", "Worker", "meet"]

_log = logging.getLogger("tfscale")

_PAUSES = (0.2, 5.0)  # seconds between two calls: the first, and the longest
_TO_TELL = 1.0  # seconds to tell workers that have not been met of a failure


class Worker(NamedTuple):
    """A worker: its name and address, equal for all workers."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"


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
    own = Hello(me, this_process(), secrets.token_hex(8), list(workers))
    run_in_thread(_Meeting(own, timeout, share_port, say).run(), "tfscale-meeting")


class Hello(NamedTuple):
    """The message in which a process introduces itself."""

    place: int  # index in the list of workers
    process: str  # for people to read
    start: str  # random, different for each process
    workers: list[Worker]


def _read_hello(greeting: Message) -> Hello:
    connections.check_version(greeting)
    place, process, start, listed = connections.fields(
        greeting, place=int, process=str, start=str, workers=list
    )
    if not 0 <= place < len(listed):
        raise NoWorker
    for one in listed:
        if not isinstance(one, list) or [type(x) for x in one] != [str, str]:
            raise NoWorker
    workers = [Worker(printable(name), printable(address)) for name, address in listed]
    return Hello(place, printable(process), start, workers)


@dataclass(eq=False)
class _Arrival(Arrival):
    called: bool  # whether this worker called that process, or that process called this worker


@dataclass
class _Peer:
    """The state of one of the workers."""

    worker: Worker
    arrivals: list[_Arrival] = field(default_factory=list)
    trouble: str = "not called yet"  # or the reason why a call failed
    ready: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set when it may answer

    def is_linked(self, called: bool) -> bool:
        return any(arrival.called == called for arrival in self.arrivals)

    @property
    def met(self) -> bool:
        return self.is_linked(True) and self.is_linked(False)

    def state(self) -> str:
        if self.met:
            return f"{self.worker} (is there, and waits for others)"
        if self.is_linked(True):
            return f"{self.worker} (it answers, but has not connected to this worker)"
        if self.is_linked(False):
            return f"{self.worker} (it has connected, but cannot be reached: {self.trouble})"
        return f"{self.worker} ({self.trouble})"


class _Meeting(Gathering[None]):
    advice = (
        "Check that each of them was started and still runs, that its TF_CONFIG has the same list "
        "of workers and its own index, and that its address can be reached from here: host name, "
        "port, firewall"
    )
    start_once = "Start each worker once, each with its own index in TF_CONFIG."

    def __init__(
        self, own: Hello, timeout: float, share_port: bool, say: Callable[[str], None]
    ) -> None:
        super().__init__(timeout, say)
        self._hello = own
        self._introduction = {"tfscale": connections.PROTOCOL, **own._asdict()}
        self._share_port = share_port
        self._own_trouble = ""
        self._is_ready = False
        self._peers = [_Peer(worker) for worker in own.workers]
        self._me = self._peers[own.place]
        self._others = [peer for peer in self._peers if peer is not self._me]

    def _activities(self) -> list[Coroutine[Any, Any, None]]:
        return [self._listen(), *(self._call(peer) for peer in self._others)]

    def _name(self) -> str:
        trouble = f" [{self._own_trouble}; {self._me.trouble}]" if self._own_trouble else ""
        return f"{self._me.worker}{trouble}"

    def _missing(self) -> str:
        missing = [peer for peer in self._others if not peer.met]
        missing = missing or [peer for peer in self._others if not peer.ready]
        return list_names([peer.state() for peer in missing]) or "its own port"

    def _check_presence(self) -> None:
        """Check whether all are there, after a change."""
        if self._server is not None and all(peer.met for peer in self._others):
            if not self._is_ready:
                self._send_to_all({"ready": True})
            self._is_ready = True
        if self._is_ready and all(peer.ready for peer in self._others):
            self._succeed(None)

    async def _give_up(self, message: Message) -> None:
        """Send an error to all; call workers that this one has not met: they would wait for it."""
        self._send_to_all(message)

        async def tell(connection: Connection) -> None:
            connection.send(self._introduction)
            connection.send(message)
            while await connection.receive():  # a connection that is closed unread may lose it
                pass

        unmet = [peer.worker.address for peer in self._others if not peer.arrivals]
        calls = [connections.call(*addresses.split(address), tell) for address in unmet]
        with contextlib.suppress(asyncio.TimeoutError):
            await connections.within(_TO_TELL, asyncio.gather(*calls))

    # -- connections

    async def _listen(self) -> None:
        host, port = addresses.split(self._me.worker.address)
        while self._server is None:
            try:
                self._server = await connections.listen(
                    self._converse, host, port, share_port=self._share_port
                )
            except OSError as error:
                problem = addresses.describe_error(error)
                self._own_trouble = f"its port cannot be opened: {problem}"
                await self._call_once(self._me)
                await asyncio.sleep(_PAUSES[0])
        self._own_trouble = ""
        self._check_presence()
        if addresses.is_ip_address(host) and connections.listens_everywhere(self._server):
            self._own_trouble = f"{host} is not an address of this machine"
        await self._call(self._me)  # another program may be there

    async def _call(self, peer: _Peer) -> None:
        """Call a worker again and again, also if the connection ends."""
        pause, longest = _PAUSES
        while True:
            peer.news.clear()
            await self._call_once(peer)
            with contextlib.suppress(asyncio.TimeoutError):
                await connections.within(pause, peer.news.wait())
            pause = min(2 * pause, longest)

    async def _call_once(self, peer: _Peer) -> None:
        host, port = addresses.split(peer.worker.address)
        peer.trouble = await connections.call(host, port, lambda one: self._converse(one, peer))

    async def _converse(self, connection: Connection, called: _Peer | None = None) -> None:
        """Talk on a connection until it ends.

        ``called`` is the worker that this one has called; None if this worker was called.
        """
        connection.send(self._introduction)
        hello = _read_hello(await connection.receive_greeting(connections.ANSWER))
        if hello.start == self._hello.start:  # the address leads back to this process, as it should
            self._own_trouble = ""
            return
        problem = self._problem(hello, called)
        if problem:
            connection.send({"gave up": problem})
            return self._fail(problem)
        peer = self._peers[hello.place]
        arrival = _Arrival(connection, hello.process, hello.start, called is not None)
        with self._present(peer.arrivals, arrival, str(peer.worker)):
            peer.news.set()
            if self._is_ready:
                connection.send({"ready": True})
            self._check_presence()
            while message := await connection.receive():
                self._fail_if_other_has(message, str(peer.worker))
                peer.ready |= message.get("ready") is True
                self._check_presence()

    # -- what is wrong

    def _problem(self, hello: Hello, called: _Peer | None) -> str:
        """Return why the process on this connection is not the expected worker; empty if it is."""
        if hello.workers != self._hello.workers:
            return self._other_list(hello)
        peer = self._peers[hello.place]
        if peer is self._me:
            return self._duplicates(str(peer.worker), self._hello.process, hello.process)
        if called is None or called is peer:
            return ""
        return (
            f"at the address of {called.worker} runs {peer.worker.name} ({hello.process}). "
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
            f"{self._me.worker} ({self._hello.process}): {what}. "
            "Give all workers the same cluster in TF_CONFIG, in the same order."
        )
