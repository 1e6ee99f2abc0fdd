"""Linux's features for the end of processes: signals to children, and adoption of orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path

_SIGNAL_OF_PARENTS_DEATH, _ADOPT_ORPHANS = 1, 36

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def signal_when_parent_ends(number: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    _prctl(_SIGNAL_OF_PARENTS_DEATH, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans."""
    _prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


def kill_children(but: Collection[int] = ()) -> None:
    """Kill this process's children, and their orphans if this process adopts orphans.

    Args:
        but: children to leave alone.
    """
    while found := set(children(os.getpid())).difference(but):
        for child in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def children(process: int) -> list[int]:
    """Return the processes whose present parent is this process."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _parent(folder) == process:
            found.append(int(folder.name))
    return found


def _parent(folder: Path) -> int:
    try:
        stat = (folder / "stat").read_text()
    except OSError:  # the process has ended
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # the name before may contain any character
