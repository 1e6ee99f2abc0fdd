"""Who hears of a process's end, and who gets what it leaves behind: what Linux does for that."""

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
    """Have the kernel send this process a signal when the thread that started it has ended."""
    _prctl(_SIGNAL_OF_PARENTS_DEATH, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind."""
    _prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


def kill_children(but: Collection[int] = ()) -> None:
    """Kill this process's children and what they leave behind, if it adopts orphans.

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
    """Processes whose parent it is now."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _parent(folder) == process:
            found.append(int(folder.name))
    return found


def _parent(folder: Path) -> int:
    try:
        stat = (folder / "stat").read_text()
    except OSError:  # it has ended
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # the name before may have any character
