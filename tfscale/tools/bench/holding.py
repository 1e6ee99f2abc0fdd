"""Processes that get a part of a processor core only, for benchmarks of unequal machines.

A *quota* is the kernel's: a cgroup whose processes may run for so many milliseconds in each period,
on all cores together. Where there is no such cgroup, signals *stop* and continue a process. That is
harder on the process, which is stopped while it waits for others, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

QUOTA, STOP = "quota", "stop"
PERIOD = 0.1  # seconds; the kernel's default
_ROOT = Path("/sys/fs/cgroup/cpu")
_LEAST = 0.001  # seconds that the kernel allows in a period

_NO_QUOTA = (
    "--hold quota needs root, and the processor controller of cgroups (version 1) at {}: {}. Take "
    "--hold stop, by which signals stop workers for a part of the time"
)


class HoldError(RuntimeError):
    """Error if processes cannot be held here; the message says what is missing."""


@contextlib.contextmanager
def holds(kind: str, cores: Sequence[float], period: float = PERIOD) -> Iterator[list[str]]:
    """Return a text for each process, for ``begin``; remove what was made for them at the end.

    Args:
        kind: ``"quota"`` or ``"stop"``.
        cores: how much of a core each process gets, at most 1 with ``"stop"``.
        period: seconds after which the kernel gives a quota again.
    """
    if kind == STOP:
        yield [f"{STOP}:{core}" for core in cores]
        return
    made: list[Path] = []
    try:
        try:
            for number, core in enumerate(cores):
                made.append(_own_cgroup() / f"tfscale-{os.getpid()}-{number}")
                made[-1].mkdir()
                (made[-1] / "cpu.cfs_period_us").write_text(f"{period * 1e6:.0f}")
                quota = max(core * period, _LEAST)
                (made[-1] / "cpu.cfs_quota_us").write_text(f"{quota * 1e6:.0f}")
        except OSError as error:
            raise HoldError(_NO_QUOTA.format(_ROOT, error)) from None
        yield [f"{QUOTA}:{folder}" for folder in made]
    finally:
        for folder in made:
            _remove(folder)


def begin(text: str) -> None:
    """Hold this process from now on, as a text of ``holds`` says."""
    kind, how = text.split(":", 1)
    if kind == QUOTA:
        (Path(how) / "cgroup.procs").write_text(str(os.getpid()))
    elif float(how) < 1:
        subprocess.Popen([sys.executable, "-IS", __file__, str(os.getpid()), how])


def words_before(folder: str) -> list[str]:
    """Return the words before a command that run it in a cgroup.

    Args:
        folder: the cgroup, a text of ``holds`` with a quota.
    """
    processes = Path(folder.removeprefix(f"{QUOTA}:")) / "cgroup.procs"
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(processes)]


def _own_cgroup() -> Path:
    """Return the folder of this process's cgroup for processors."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return _ROOT / path.lstrip("/")
    return _ROOT


def _remove(folder: Path) -> None:
    """Remove a cgroup; the kernel needs a moment after its last process has ended."""
    for _ in range(50):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)


def _stop_and_continue(process: int, core: float) -> None:
    """Let a process run for a part of each period, until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == process:
            time.sleep(core * PERIOD)
            os.kill(process, signal.SIGSTOP)
            try:
                time.sleep((1 - core) * PERIOD)
            finally:
                os.kill(process, signal.SIGCONT)


if __name__ == "__main__":
    _stop_and_continue(int(sys.argv[1]), float(sys.argv[2]))
