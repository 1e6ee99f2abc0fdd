"""The cores and GPUs of a host, and their division between workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfscale.support import cgroups

_NO_GPU = ("-1", "NoDevFiles", "none", "void", "")  # Slurm and container runtimes write these, too


def cores() -> list[int]:
    """Return the cores on which this process may run."""
    return sorted(os.sched_getaffinity(0))


def processors() -> int:
    """Return how many processes of this host can compute at once: cores, or a container's quota."""
    quota = cgroups.processors()
    return len(cores()) if quota is None else max(1, min(len(cores()), round(quota)))


def gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, or all GPUs of the driver."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        found = Path("/proc/driver/nvidia/gpus")
        return [str(i) for i in range(len(list(found.iterdir())))] if found.is_dir() else []
    names = [name.strip() for name in chosen.split(",")]
    return [name for name in names if name not in _NO_GPU]


def part(things: Sequence, index: int, count: int) -> list:  # type: ignore[type-arg]
    """Return one worker's share: equal shares in order; with too few things, several share one."""
    if len(things) < count:
        return [things[index * len(things) // count]] if things else []
    each = len(things) // count
    return list(things[index * each : (index + 1) * each])


def shared(
    local: int, count: int, devices: int | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return variables that give one of this host's workers its share of threads and GPUs."""
    found = {}
    if count > 1:
        threads = str(len(part(range(processors()), local, count)))
        names = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
        found = {name: threads for name in names if name not in environment}
    if listed := gpus(environment):
        found["CUDA_VISIBLE_DEVICES"] = ",".join(_own_gpus(listed, local, count, devices))
    elif devices:
        found["TFSCALE_LOGICAL_CPUS"] = str(devices)
    return found


def _own_gpus(listed: Sequence[str], local: int, count: int, devices: int | None) -> list[str]:
    if count * (devices or 1) > len(listed):
        raise ValueError(
            f"{count} workers with {devices or 1} GPU each need {count * (devices or 1)} GPUs, and "
            f"this host has {len(listed)} ({', '.join(listed)}): start fewer workers, or train on "
            "CPUs with CUDA_VISIBLE_DEVICES=-1"
        )
    each = devices or len(listed) // count
    return list(listed[local * each : (local + 1) * each])
