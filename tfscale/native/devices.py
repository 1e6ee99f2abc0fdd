"""Choice of a worker's devices: its share of the host's GPUs, and its logical CPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import tensorflow as tf

from tfscale.bridge import started
from tfscale.cluster.sources import Source

_T = TypeVar("_T")


def share_of(gpus: Sequence[_T], local_index: int, local_count: int) -> list[_T]:
    """Return this worker's share of GPUs that several workers see: equally many for each.

    Return all GPUs if they are fewer than the workers: then the launcher has already given each
    worker GPUs of its own.
    """
    each = len(gpus) // local_count
    if each == 0:
        return list(gpus)
    return list(gpus[each * local_index : each * (local_index + 1)])


def take_share(source: Source) -> None:
    """Hide the GPUs of this host's other workers; call it before TensorFlow uses a GPU."""
    visible = tf.config.get_visible_devices("GPU")
    own = share_of(visible, source.local_index, source.local_count)
    if not source.shares_gpus or own == visible:
        return
    try:
        tf.config.set_visible_devices(own, "GPU")
    except RuntimeError as error:
        raise RuntimeError(
            f"{source.local_count} workers share this host and its {len(visible)} GPUs. This "
            f"worker needs {', '.join(gpu.name for gpu in own)}, but TensorFlow was started "
            f"before, {started.describe_start()}. Make the strategy before any tensor, or set "
            "CUDA_VISIBLE_DEVICES for each worker."
        ) from error


LOGICAL_CPUS = "TFSCALE_LOGICAL_CPUS"  # ``tfscale launch --devices-per-worker`` sets it


def split_cpu(environ: Mapping[str, str] = os.environ) -> None:
    """Split the CPU into as many logical devices as ``LOGICAL_CPUS`` says.

    Do nothing if the program has already made logical devices.
    """
    wanted = environ.get(LOGICAL_CPUS)
    if wanted is None:
        return
    (cpu,) = tf.config.list_physical_devices("CPU")
    if len(tf.config.get_logical_device_configuration(cpu) or ()) > 1 or wanted == "1":
        return
    try:
        logical = [tf.config.LogicalDeviceConfiguration()] * int(wanted)
        tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError as error:
        raise RuntimeError(
            f"this worker needs {wanted} logical CPUs ({LOGICAL_CPUS}), but TensorFlow "
            f"was started before, {started.describe_start()}. Make the strategy before any "
            "tensor, or leave out --devices-per-worker."
        ) from error
