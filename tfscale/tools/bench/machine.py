"""Description of the machine, without which measurements mean nothing."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tfscale.native import memory
from tfscale.support.version import __version__


def describe() -> dict[str, Any]:
    """Return a description of this machine.

    Call it before the benchmark starts, whose own load would count otherwise.
    """
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge_pages": memory.huge_pages(),
        "python": platform.python_version(),
        "tensorflow": _tensorflow(),
        "tfscale": __version__,
    }


def warning(machine: dict[str, Any], most_processes: int) -> str | None:
    """Return a warning about conditions that distort the times; None if there are none."""
    found = []
    if machine["load_average"] > 0.25 * machine["cores"]:
        found.append(
            f"the machine was busy before the start (load average {machine['load_average']}): "
            "compare only times of this run"
        )
    if most_processes > machine["cores"]:
        found.append(
            f"{most_processes} processes share {machine['cores']} cores: "
            "with a machine for each they would be faster"
        )
    return "; ".join(found) or None


def line(machine: dict[str, Any]) -> str:
    """Return the line below a table that describes the machine and the versions."""
    return (
        f"machine: {machine['cpu']}, {machine['cores']} cores; {machine['kernel']}, huge pages "
        f"{machine['huge_pages']}; "
        f"TensorFlow {machine['tensorflow']}; tfscale {machine['tfscale']}"
    )


def signature(machine: dict[str, Any], name: str, argv: Sequence[str]) -> str:
    """Return the last lines of ``tfscale bench NAME``: the machine, and the command."""
    return (
        f"machine: {machine['cpu']}, {machine['cores']} cores, load average "
        f"{machine['load_average']}; TensorFlow {machine['tensorflow']}\n"
        f"command: {shlex.join(['tfscale', 'bench', name, *argv])}"
    )


def split_cpu(devices: int) -> None:
    """Split this process's CPU into logical devices; call it before TensorFlow starts."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * devices
    tf.config.set_logical_device_configuration(cpu, logical)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _tensorflow() -> str:
    for package in ("tensorflow", "tensorflow-cpu", "tf-nightly"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
