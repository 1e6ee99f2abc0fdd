"""Memory that this process holds, as Linux counts it."""

from __future__ import annotations


def resident_memory() -> int:
    """Return the memory that this process holds now, in bytes."""
    return _of_status("VmRSS")


def highest_memory() -> int:
    """Return the most memory that this process has held, in bytes.

    The peak that ``getrusage`` knows may be that of the process which started this one.
    """
    return _of_status("VmHWM")


def _of_status(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}: this needs Linux")
