"""Memory that a process keeps, since each fresh page of 4 KiB costs a page fault.

TensorFlow takes tensors from malloc, and glibc maps fresh pages for each large tensor. So an
all-reduce of 25 million numbers, 100 MB, has 24,415 page faults, and a training step has as many
for each gradient of this size. TensorFlow has two pools that keep their memory. TensorFlow turns
one on by itself where oneDNN computes (x86 processors with VNNI instructions); ``keep_tensors``
turns on the other.

The messages of TensorFlow's transport come from malloc in any case, several copies of each. glibc
gives that memory back to the system after each message; ``keep_freed_memory`` makes glibc keep it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

from tfscale.bridge import started

# TensorFlow reads these variables when it makes a process's CPU devices.
POOL = "TF_CPU_ALLOCATOR_USE_BFC"
_LARGEST_POOL = "TF_CPU_BFC_MEM_LIMIT_IN_MB"
_NO_OWN_POOL = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"  # turns oneDNN's pool off
# A program that starts with these variables gives the memory of a tensor back when it frees the
# tensor. glibc maps what is larger than the threshold; by default it raises its threshold.
WITHOUT_POOL = {POOL: "false", _NO_OWN_POOL: "true", "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}

ADVICE = (
    f"Let TensorFlow keep its memory: leave {POOL} unset or true, and make the strategy before the "
    "first tensor"
)

_MIB = 1 << 20
_NO_LIMIT = 1 << 24  # in MiB; TensorFlow's own limit, 64 GB, is less than some machines have

# The parameters of mallopt(3), by their numbers in malloc.h.
_SETTINGS = {
    -1: 64 * _MIB,  # M_TRIM_THRESHOLD: bytes that may stay free at an arena's end
    -2: 64 * _MIB,  # M_TOP_PAD: size of a whole arena; with less, glibc returns empty arenas
    -3: 8 * _MIB,  # M_MMAP_THRESHOLD: above the size of messages, below that of most tensors
}


def keep_memory() -> None:
    """Make this process keep the memory of tensors and of messages, unless the user has chosen.

    Call it before TensorFlow makes its devices.
    """
    keep_tensors()
    keep_freed_memory()


def keep_tensors() -> bool:
    """Make TensorFlow take the tensors of CPUs from a pool that keeps its memory.

    Returns:
        Whether TensorFlow does so; False if the user has chosen otherwise, or if TensorFlow had
        made its devices before.
    """
    if not _has_own_pool() and not started.has_devices():
        for name, value in {POOL: "true", _LARGEST_POOL: str(_NO_LIMIT)}.items():
            os.environ.setdefault(name, value)
    return has_pool()


def has_pool() -> bool:
    """Return whether TensorFlow takes the tensors of CPUs from a pool that keeps its memory."""
    return _has_own_pool() or _pool_is_on()


def words() -> str:
    """Return a sentence that says whether TensorFlow keeps the memory of tensors, and why."""
    if _has_own_pool():
        return "TensorFlow keeps the memory of tensors, in oneDNN's pool"
    if _pool_is_on():
        return f"TensorFlow keeps the memory of tensors, since tfscale has set {POOL}=true"
    if POOL in os.environ:
        why, now = f"{POOL}={os.environ[POOL]} says so", f"unset {POOL}"
    else:
        why = f"it was started {started.describe_start()} before tfscale could turn its pool on"
        now = f"make the strategy first, or set {POOL}=true before the program starts"
    return (
        f"TensorFlow takes fresh memory for each large tensor, which costs page faults: {why}. To "
        f"keep memory, {now}"
    )


def _has_own_pool() -> bool:
    from tfscale.bridge.tensorflow import uses_onednn  # loads TensorFlow

    return platform.machine() == "x86_64" and uses_onednn() and not _is_on(_NO_OWN_POOL)


def _pool_is_on() -> bool:
    return _is_on(POOL)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("true", "1")


def huge_pages() -> str:
    """Return when Linux uses huge pages for a process's memory: always, madvise, never or unknown.

    With "madvise", the default of Debian and Ubuntu, Linux uses them only where a program asks.
    """
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else "unknown"


def keep_freed_memory() -> bool:
    """Make glibc keep the memory that messages need; return whether that was done.

    Existing arenas do not change, so call it before TensorFlow's server starts. Do nothing without
    glibc, or if the user has tuned glibc.
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
