"""Checks of this machine, or the container: devices, cores, memory, descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import resource
import shutil
import time
from pathlib import Path

from tfscale.native import memory as memory_of_process
from tfscale.support import cgroups
from tfscale.support.cgroups import text_of
from tfscale.tools.doctor.check import Check, ok, problem, warning
from tfscale.tools.doctor.probe import Seen

GB = 1e9
ENOUGH_DESCRIPTORS = 1024
LITTLE_MEMORY = 2 * GB  # TensorFlow itself takes a quarter of it, a compiler up to 1.5 GB
LITTLE_SHM = 1 * GB  # NVIDIA's recommendation for containers

_TOUCHED = 64 << 20  # bytes

_UNLIMITED = 1 << 60  # cgroups use a number above this for "no limit"


# --------------------------------------------------------------------------- devices


def devices(seen: Seen) -> Check:
    """Check the GPUs that TensorFlow sees."""
    if seen.gpus is None:
        return problem(
            "devices",
            seen.error or "TensorFlow did not say",
            "If this names CUDA or the driver, compare `nvidia-smi` with what this TensorFlow "
            "needs; CUDA_VISIBLE_DEVICES=-1 trains on CPUs.",
        )
    if seen.gpus:
        return ok(
            "devices", f"{len(seen.gpus)} GPU{'s' * (len(seen.gpus) > 1)}: {', '.join(seen.gpus)}"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") is None and _has_nvidia():
        return warning(
            "devices",
            "CPU only: this machine has an NVIDIA GPU, but TensorFlow does not see it",
            "pip install 'tensorflow[and-cuda]'; its log (TF_CPP_MIN_LOG_LEVEL=0) says which "
            "library it does not find.",
        )
    return ok("devices", "CPU only")


def _has_nvidia() -> bool:
    return Path("/dev/nvidia0").exists()


# ----------------------------------------------------------------------------- cores


def cores() -> Check:
    """Check how many cores this process may use."""
    here = len(os.sched_getaffinity(0))
    of = f" of the machine's {os.cpu_count()}" if here != os.cpu_count() else ""
    found = f"{here}{of} ({platform.machine()}{_vectors()})"
    quota = cgroups.processors()
    if quota is None or quota >= here:
        return ok("cores", found)
    return warning(
        "cores",
        f"{found}, but the container may use only {quota:g} of them (its quota)",
        f"TensorFlow starts a thread for each core that it sees, and they wait for each other: "
        f"call tf.config.threading.set_intra_op_parallelism_threads({max(1, round(quota))}), or "
        "give the container whole cores (--cpuset-cpus).",
    )


def _vectors() -> str:
    known = ("sse2", "f16c", "avx2", "avx512f", "asimd", "sve")
    words = set((text_of(Path("/proc/cpuinfo")) or "").split())
    found = " ".join(name for name in known if name in words)
    return f", vectors: {found}" if found else ""


# ---------------------------------------------------------------------------- memory


def memory() -> Check:
    """Check how much memory is free, within the container's limits."""
    free, limit = _free_memory()
    found = f"{free / GB:.1f} of {_meminfo_bytes('MemTotal') / GB:.1f} GB free"
    if limit is not None:
        found = f"{free / GB:.1f} GB free: the container's limit is {limit / GB:.1f} GB"
    if free >= LITTLE_MEMORY:
        return ok("memory", found)
    return warning(
        "memory",
        found,
        "A process with TensorFlow takes 0.5 GB before it has a model, and the system kills it "
        "when memory runs out. Free some, or raise the limit (docker run --memory).",
    )


def free_memory() -> int:
    """Return how many bytes of memory are free, within the container's limits."""
    return _free_memory()[0]


def _free_memory() -> tuple[int, int | None]:
    """Return the free bytes, and the limit that leaves no more; None if there is none."""
    free, limit = _meminfo_bytes("MemAvailable"), None
    for one, used in _memory_limits():
        if one - used < free:
            free, limit = max(0, one - used), one
    return free, limit


def pages(keeps_memory: bool) -> Check:
    """Check that TensorFlow does not wait for fresh pages in each step; measure what they cost."""
    measured = zip(_touch_seconds(), _touch_seconds(), strict=True)
    fresh, huge, kept = (1e3 * min(seconds) for seconds in measured)
    cost = (
        f"{_TOUCHED >> 20} MB take {fresh:.0f} ms in fresh pages, {huge:.0f} ms in fresh huge "
        f"pages ({memory_of_process.huge_pages()}), {kept:.0f} ms in memory that is kept"
    )
    if keeps_memory:
        return ok("pages", f"TensorFlow keeps the memory of tensors; {cost}")
    return warning(
        "pages",
        f"TensorFlow takes fresh memory for each large tensor; {cost}",
        f"Unset {memory_of_process.POOL}, which turns TensorFlow's pool off.",
    )


def _touch_seconds() -> tuple[float, float, float]:
    """Return the seconds of writing to fresh memory, to fresh huge pages, and to kept memory."""
    found = []
    for advice in (None, mmap.MADV_HUGEPAGE):
        with mmap.mmap(-1, _TOUCHED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
            if advice is not None:
                with contextlib.suppress(OSError):  # a kernel without them
                    area.madvise(advice)
            content = ctypes.c_char.from_buffer(area)
            for _ in range(2):
                start = time.perf_counter()
                ctypes.memset(ctypes.addressof(content), 1, _TOUCHED)
                found.append(time.perf_counter() - start)
            del content  # or the area cannot be closed
    fresh, kept, huge, _ = found
    return fresh, huge, kept


def _memory_limits() -> list[tuple[int, int]]:
    """Return limit and use of each group of this process that has a limit."""
    found = []
    for folder in cgroups.folders("memory"):
        limit = text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes") or ""
        used = text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes") or ""
        if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED:
            # The kernel drops cached files when memory is short.
            cached = _cached_bytes(folder / "memory.stat")
            found.append((int(limit), max(0, int(used) - cached)))
    return found


def _cached_bytes(file: Path) -> int:
    fields = dict(line.split(maxsplit=1) for line in (text_of(file) or "").splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def _meminfo_bytes(name: str) -> int:
    for line in (text_of(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


# ---------------------------------------------------------------------------- limits


def descriptors(others: int, streams: int) -> Check:
    """Check the limit of open files; ``others`` is the number of other workers in the cluster."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors_needed(others, streams)
    wanted = max(needed, ENOUGH_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        limit = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} open files"
        return ok("descriptors", f"{limit} (ulimit -n)")
    may = hard == resource.RLIM_INFINITY or hard >= wanted
    only_root = "" if may else f" Only root may: the hard limit is {hard}."
    advice = f"Run `ulimit -n {wanted}` in the shell that starts the training.{only_root}"
    found = f"{soft} open files (ulimit -n); a worker of this cluster needs about {needed}"
    if soft < needed:
        return problem("descriptors", found, advice)
    return warning("descriptors", f"{found}, and data in many files needs more", advice)


_ALONE = 32  # files of a process that trains alone: 14 were measured, and data needs some
_BY_TENSORFLOW = 2  # connections to each other worker
_GROUPS = 2  # groups of a strategy, each with its own connections


def descriptors_needed(others: int, streams: int) -> int:
    """Return the number of files that a worker needs.

    The formula was measured in trainings of two and three workers, with one stream and with eight.
    """
    return _ALONE + others * (_BY_TENSORFLOW + _GROUPS * streams)


def shm(gpus: int) -> Check:
    """Check /dev/shm for NCCL; tfscale's shared memory does not use it, see docs/transports.md."""
    size = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    found = f"{size / GB:.2f} GB; tfscale's shared memory is elsewhere"
    if gpus < 2 or size >= LITTLE_SHM:
        return ok("/dev/shm", found)
    return warning(
        "/dev/shm",
        f"{found}, but NCCL between this machine's {gpus} GPUs may",
        "If NCCL says that it cannot open shared memory, give the container more: "
        "docker run --shm-size=1g.",
    )
