"""Which devices a worker takes: of GPUs that others see, too, and as many CPUs as it is told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import tensorflow as tf

from tfscale import started
from tfscale.launch.sources import Source

_T = TypeVar("_T")


def share_of(gpus: Sequence[_T], local_index: int, local_count: int) -> list[_T]:
    """Of GPUs that several workers see, equally many for each; all, where there are too few.

    Where a process sees fewer than there are workers, its launcher gave each its own.
    """
    each = len(gpus) // local_count
    if each == 0:
        return list(gpus)
    return list(gpus[each * local_index : each * (local_index + 1)])


def take_share(source: Source) -> None:
    """Make the GPUs of the other workers of this host invisible; before any is used."""
    visible = tf.config.get_visible_devices("GPU")
    own = share_of(visible, source.local_index, source.local_count)
    if not source.shares_gpus or own == visible:
        return
    try:
        tf.config.set_visible_devices(own, "GPU")
    except RuntimeError as error:
        raise RuntimeError(
            f"{source.local_count} workers share this host and its {len(visible)} GPUs, and this "
            f"one takes {', '.join(gpu.name for gpu in own)}; but TensorFlow was started before, "
            f"{started.words()}. Make the strategy before any tensor, or set CUDA_VISIBLE_DEVICES "
            "for each worker."
        ) from error


LOGICAL_CPUS = "TFSCALE_LOGICAL_CPUS"  # as ``tfscale launch --devices-per-worker`` sets it


def split_cpu(environ: Mapping[str, str] = os.environ) -> None:
    """Make the CPU as many logical devices as asked for, unless the program has made its own."""
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
            f"this worker is to have {wanted} logical CPUs ({LOGICAL_CPUS}), but TensorFlow "
            f"was started before, {started.words()}. Make the strategy before any tensor, or leave "
            "out --devices-per-worker."
        ) from error
