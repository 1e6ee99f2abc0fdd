"""``tfscale launch``: attempts, until one succeeds or none is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfscale.cluster import JoinError
from tfscale.cluster.sources import TF_CONFIG, find_sources
from tfscale.tools.launch import machine
from tfscale.tools.launch.attempt import Attempt, Ended, HostsLost, Outcome
from tfscale.tools.launch.hosts import Host, places
from tfscale.tools.launch.output import Logs, Screen
from tfscale.tools.launch.request import Request, parse
from tfscale.tools.launch.supervised import HostError
from tfscale.tools.launch.writer import Writer, replace_what_cannot_be_shown

_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
# seconds before another attempt: the first pause, and the longest
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_SHOWN = 500  # characters of each of a failed worker's last lines
_CLOSED_OUTPUT = 141  # exit status that shells report of a command whose reader has ended


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return the status of the worker that failed first."""
    request = parse(sys.argv[1:] if words is None else words)
    if request.dry_run:
        try:
            print(described(request))
        except ValueError as error:
            print(f"tfscale launch: {error}", file=sys.stderr)
            return 2
        return 0
    replace_what_cannot_be_shown(sys.stdout, sys.stderr)
    if warning := of_repetition(request, os.environ):
        print(f"tfscale launch: warning: {warning}", file=sys.stderr, flush=True)
    writer = Writer()
    try:
        status = asyncio.run(_Launcher(request, writer).run())
        writer.leave(status)
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_OUTPUT


def of_repetition(request: Request, environ: Mapping[str, str]) -> str:
    """Return a warning if several independent launchers were started; only the first one warns."""
    if request.nodes:
        return ""
    try:
        outer = next((each for each in find_sources(environ) if each.name != TF_CONFIG), None)
    except ValueError:
        return ""  # variables that nothing reads here may be broken
    if outer is None or outer.index != 0:
        return ""
    return (
        f"{outer.name} starts this command {outer.count} times, and each time it begins a "
        f"training of its own. For one training leave out `tfscale launch`: {outer.name} starts "
        "the workers, and they find each other. For one launcher per host give each --nnodes, "
        "--node-rank and --master-addr."
    )


def described(request: Request) -> str:
    """Describe the workers that would be started, one per line."""
    lines = []
    for place in places(request.hosts):
        host = request.hosts[place.host]
        way = f" (over {request.ssh})" if not host.is_here else ""
        shared = machine.shared(place.local, host.workers, request.devices) if host.is_here else {}
        words = [*(f"{name}={value}" for name, value in shared.items()), *request.command]
        lines.append(f"worker {place.rank} on {host.name}{way}: {shlex.join(words)}")
    if request.nodes:
        lines.append(
            f"These are the workers of node {request.nodes.rank} of {request.nodes.count}; all "
            "nodes' ranks are counted in the order of nodes."
        )
    lines.append(
        f"in {request.folder}; each gets its own TF_CONFIG, with ports chosen at the start"
    )
    return "\n".join(lines)


def merged(timelines: Mapping[int, str], to: Path) -> str:
    """Write the workers' timelines to one file; return a message about the result."""
    from tfscale.analysis.telemetry import merge

    if not timelines:
        return (
            f"nothing was written to {to}: no worker recorded a timeline. Give fit the callback "
            "tfscale.callbacks.Telemetry(), which records steps 10 to 12"
        )
    with tempfile.TemporaryDirectory(prefix="tfscale-timelines-") as folder:
        files = [Path(folder) / f"{rank}.json" for rank in sorted(timelines)]
        for file, rank in zip(files, sorted(timelines)):
            file.write_text(timelines[rank])
        try:
            merge(files, to)
        except (OSError, ValueError) as error:
            return f"the timelines could not be written to {to}: {error}"
    return (
        f"the timelines of {len(timelines)} workers are in {to}: open it in https://ui.perfetto.dev"
    )


class _Launcher:
    def __init__(self, request: Request, writer: Writer) -> None:
        self._request = request
        self._writer = writer
        self._hosts = list(request.hosts)
        self._interrupts = 0
        self._attempt: Attempt | None = None
        self._stopped = asyncio.Event()
        self._failed_before: tuple[str, int] | None = None
        self._screen = self._new_screen()

    def _new_screen(self) -> Screen:
        workers = sum(host.workers for host in self._hosts)
        return Screen(
            workers,
            prefix=self._request.prefix,
            all_bars=self._request.all_bars,
            put=self._writer.put,
        )

    async def run(self) -> int:
        """Run all attempts and write all output; return the exit status.

        Raise ``BrokenPipeError``, with all workers ended, once nobody reads the output.
        """
        attempts = asyncio.ensure_future(self._run())
        nobody_reads = asyncio.ensure_future(self._writer.reader_ended())
        await asyncio.wait((attempts, nobody_reads), return_when=asyncio.FIRST_COMPLETED)
        if not attempts.done():
            attempts.cancel()
            await asyncio.wait((attempts,))
            raise BrokenPipeError
        nobody_reads.cancel()
        status = attempts.result()
        await self._writer.all_written()
        return status

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        for passed_on in _PASSED_ON:
            loop.add_signal_handler(passed_on, self._pass_on, passed_on)
        pause = _PAUSE
        for number in range(self._request.restarts + 1):
            try:
                outcome = await self._once(number)
                status, why = self._judge(outcome)
            except HostsLost as lost:
                self._screen.say(str(lost))
                outcome, status, why = Outcome(lost=lost.hosts), 255, str(lost)
            except (HostError, JoinError) as error:
                self._screen.say(str(error))
                return 1
            except asyncio.CancelledError:
                return 128 + (signal.SIGINT if self._interrupts else signal.SIGTERM)
            if status == 0 or self._stopped.is_set():
                return status
            if number == self._request.restarts or not self._go_on(outcome, number, why, pause):
                return status
            await self._rest(pause)
            if self._stopped.is_set():
                return 128 + signal.SIGINT if self._interrupts else status
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise AssertionError("the last attempt returns")

    async def _once(self, number: int) -> Outcome:
        self._screen = self._new_screen()
        folder = self._request.log_dir
        logs = Logs(folder / f"attempt-{number}" if folder else None, self._screen)
        self._attempt = Attempt(self._request, self._hosts, self._screen, logs, self._writer.room)
        try:
            outcome = await self._attempt.run()
        finally:
            self._attempt = None
            logs.close()
        if self._request.timeline:
            self._screen.say(merged(outcome.timelines, self._request.timeline))
        return outcome

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

    # -- how it ended

    def _judge(self, outcome: Outcome) -> tuple[int, str]:
        """Return the exit status and a line; report the first failure, with its last lines."""
        first = outcome.first
        if self._interrupts:
            return 128 + signal.SIGINT, ""
        if first is None:
            return 0, ""
        if self._stopped.is_set():
            self._screen.say(f"ended by SIGTERM, which was passed on: {first.how}")
            return first.status, ""
        text = self._story(first)
        last = [f"    {line[:_SHOWN]}" for line in self._screen.last(first.place.rank)]
        self._screen.say("\n".join([f"{text}. Its last lines:", *last] if last else [text]))
        return first.status, text

    def _story(self, first: Ended) -> str:
        host = self._hosts[first.place.host].name
        who = f"worker {first.place.rank} on {host}"
        return f"{who} failed first, {first.after:.1f} s after its start: {first.how}"

    # -- another attempt

    def _go_on(self, outcome: Outcome, number: int, why: str, pause: float) -> bool:
        """Return whether enough workers are left; report the loss and its consequences."""
        before = sum(host.workers for host in self._hosts)
        left = self._left(outcome)
        workers = sum(host.workers for host in left)
        if workers < self._request.least:
            needed = f"{self._request.least} are needed (--min-workers)"
            self._screen.say(f"{workers} of {before} workers are left, and {needed}: {why}")
            return False
        self._hosts = left
        fewer = (
            f" with {workers} workers instead of {before}: the global batch and the steps of an "
            "epoch stay, each worker takes a larger part, and residuals are shared out "
            "anew"
            if workers < before
            else ""
        )
        self._screen.say(
            f"attempt {number + 2} of {self._request.restarts + 1} begins in {pause:g} s{fewer}. "
            "It continues from the last backup, if the program makes one (BackupAndRestore)"
        )
        return True

    def _left(self, outcome: Outcome) -> list[Host]:
        """Return the remaining hosts, without a place that failed first twice in a row."""
        if outcome.lost:
            self._failed_before = None
            return [host for at, host in enumerate(self._hosts) if at not in outcome.lost]
        first = outcome.first
        assert first is not None
        failed = (self._hosts[first.place.host].name, first.place.local)
        again, self._failed_before = failed == self._failed_before, failed
        workers = sum(host.workers for host in self._hosts)
        if not again or workers <= self._request.least:
            return self._hosts
        self._failed_before = None
        at = first.place.host
        fewer = self._hosts[at]._replace(workers=self._hosts[at].workers - 1)
        all_of_them = [*self._hosts[:at], fewer, *self._hosts[at + 1 :]]
        return [host for host in all_of_them if host.workers]

    # -- signals

    def _interrupt(self) -> None:
        """Handle Ctrl-C: the first one goes to the workers, the second one ends them at once."""
        self._interrupts += 1
        self._stopped.set()
        if self._interrupts > 1:
            self._writer.hurry()
        if self._attempt is None:
            return
        if self._interrupts == 1:
            if self._attempt.has_begun:
                self._screen.say("interrupted, with all workers; Ctrl-C again ends them now")
            self._attempt.stop(signal.SIGINT)
        else:
            self._attempt.signal(signal.SIGKILL)

    def _pass_on(self, number: int) -> None:
        """Pass a signal on; a second SIGTERM ends the workers, by SIGKILL after the grace."""
        again = number == signal.SIGTERM and self._stopped.is_set()
        if number == signal.SIGTERM:
            self._stopped.set()
        if self._attempt is None:
            return
        if again:
            self._writer.hurry()
            self._attempt.stop(number)
        else:
            self._attempt.pass_on(number)
