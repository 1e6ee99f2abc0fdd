"""Heap memory for the messages of other hosts.

TensorFlow copies each message through heap memory of its own, several times its size. Left
alone, glibc gives that back to the system after each message, and the next one pays a page
fault for every 4 KiB: a quarter of an all-reduce over loopback.
"""

from __future__ import annotations

import ctypes
import os
import platform

_MIB = 1 << 20

# The parameters of mallopt(3), by their numbers in malloc.h.
_SETTINGS = {
    -1: 64 * _MIB,  # M_TRIM_THRESHOLD: so much may be free at an arena's end
    -2: 64 * _MIB,  # M_TOP_PAD: a whole arena; with less, empty ones are given back
    -3: 8 * _MIB,  # M_MMAP_THRESHOLD: more than a message, less than most tensors
}


def keep_freed_memory() -> bool:
    """Make the heap keep the memory that messages need; returns whether that was done.

    Arenas that exist already go on as before, so call it before TensorFlow's server starts.
    Does nothing without glibc, or if the user has tuned it.
    """
    if platform.libc_ver()[0] != "glibc" or _tuned_by_user():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) for parameter, value in _SETTINGS.items())


def _tuned_by_user() -> bool:
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")
    return any(name in os.environ for name in names) or "glibc.malloc." in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
