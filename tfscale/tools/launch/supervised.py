"""The launcher's side of a host: a supervisor there, started here or over ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Sequence
from typing import Any

from tfscale.support.version import __version__
from tfscale.tools.launch import protocol
from tfscale.tools.launch.hosts import Host

_GREETING = 60.0  # seconds: ssh has its own time limit, and Python may be slow to start
_GONE = 10.0  # seconds, beyond the grace period, until a supervisor has ended its workers

# Without a terminal, ssh must fail instead of asking, and must notice a lost host.
_SSH_OPTIONS = (
    "-T", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=10",
    "-oServerAliveCountMax=3",
)  # fmt: skip
_ADVICE = (
    ("Host key verification failed", "ssh does not know this host yet: connect once by hand"),
    ("Permission denied", "ssh could not log in without a password: add your key there"),
    ("No module named", "tfscale is not installed there for this Python: install it, or --python"),
    ("not found", "there is no such Python there: install it, or name another one by --python"),
    ("No such file", "there is no such Python there: install it, or name another one by --python"),
    ("Could not resolve", "its name is not known here: check it, or write the address"),
)


class HostError(RuntimeError):
    """Raised if a host is lost or cannot start anything; the message says which and why."""


class Supervised:
    """A supervisor and its workers.

    Attributes:
        greeting: the supervisor's first message: its version, its held ports, its connection.
    """

    def __init__(self, host: Host, process: asyncio.subprocess.Process, grace: float) -> None:
        self.host = host
        self._grace = grace
        self.greeting: dict[str, Any] = {}
        self._process = process
        self._words: list[str] = []  # lines that are not messages: of ssh, or of a login shell
        self._hears = asyncio.create_task(self._hear_errors())
        self._pulse: asyncio.Task[None] | None = None

    @classmethod
    async def begin(
        cls, host: Host, *, ssh: str, python: str, loopback: bool, grace: float, silence: float
    ) -> Supervised:
        """Start a supervisor and wait for its greeting; raise ``HostError`` if that fails."""
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(host, ssh, python),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=protocol.LONGEST,
                env={**os.environ, **_path()},
                cwd="/",  # no file of the user's folder can shadow a module of Python
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        except OSError as error:
            raise HostError(f"{host.name}: {error.strerror}: {error.filename}") from None
        one = cls(host, process, grace)
        first = {"grace": grace, "ports": host.workers, "loopback": loopback}
        try:
            one.tell(**first, silence=None if host.is_here else silence)
            await one._greet()
        except BaseException:
            await one.end()
            raise
        if not host.is_here:
            one._pulse = asyncio.create_task(one._live(silence / 4))
        return one

    async def _greet(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            while message := await asyncio.wait_for(self.next(), _GREETING):
                if (
                    message.get("protocol") == protocol.PROTOCOL
                    and message["tfscale"] == __version__
                ):
                    self.greeting = message
                    self._words.clear()  # what a login says explains nothing that comes later
                    return
                if "tfscale" in message:
                    raise HostError(
                        f"{self.host.name}: tfscale {message['tfscale']} is installed there, and "
                        f"{__version__} here; install the same on all hosts"
                    )
        raise self.lost(f"it did not start within {_GREETING:.0f} s")

    async def next(self) -> dict[str, Any] | None:
        """Return the next message; None at the end."""
        assert self._process.stdout is not None
        while data := await protocol.read(self._process.stdout):
            message = protocol.parsed(data)
            if message is not None:
                return message
            self._words.append(data.decode(errors="replace"))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._hears), 1.0)
        return None

    def tell(self, **order: Any) -> None:
        """Send the supervisor an order. If the supervisor, or ssh, was stopped, it continues."""
        assert self._process.stdin is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        if not self._process.stdin.is_closing():
            self._process.stdin.write(protocol.line(order))

    def lost(self, what: str = "its connection was cut") -> HostError:
        """Return the error that says why the supervisor is gone."""
        said = " ".join("".join(self._words).split())[-400:]
        if self.greeting:
            return HostError(f"{self.host.name}: {what}{said and f'; it said: {said}'}")
        advice = next((f" ({advice})" for sign, advice in _ADVICE if sign in said), "")
        return HostError(f"{self.host.name}: {said or what}{advice}")

    async def end(self) -> None:
        """Let the supervisor end its workers, if they still run, and itself."""
        if self._pulse is not None:
            self._pulse.cancel()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), self.longest_end)
        self.kill()
        self._hears.cancel()

    @property
    def longest_end(self) -> float:
        """Seconds in which the supervisor ends its workers and itself after the order."""
        return self._grace + _GONE

    def kill(self) -> None:
        """End the supervisor by force, or the ssh to it; its workers end with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _hear_errors(self) -> None:
        assert self._process.stderr is not None
        while data := await protocol.read(self._process.stderr):
            self._words.append(data.decode(errors="replace"))
            del self._words[:-50]

    async def _live(self, each: float) -> None:
        while True:
            await asyncio.sleep(each)
            self.tell(pulse=True)


def _command(host: Host, ssh: str, python: str) -> Sequence[str]:
    program = [python, "-m", "tfscale.tools.launch.supervisor"]
    if host.is_here:
        return program
    # If PYTHONPATH finds this package here, it finds it there, too.
    path = [f"{name}={value}" for name, value in _path().items()]
    there = shlex.join(["env", *path, *program])
    user, at, place = host.name.rpartition("@")
    name = f"{user}{at}{place.strip('[]')}"
    return [*shlex.split(ssh), *_SSH_OPTIONS, name, f"cd / && exec {there}"]


def _path() -> dict[str, str]:
    """Return PYTHONPATH as seen from any folder."""
    words = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = os.pathsep.join(os.path.abspath(word) for word in words if word)
    return {"PYTHONPATH": found} if found else {}
