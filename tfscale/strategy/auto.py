"""``auto_strategy``, which chooses the strategy that fits the machine."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

import tensorflow as tf

from tfscale.compression.policy import policy_of
from tfscale.native.group import DEFAULT_JOIN_TIMEOUT, resolver_of, tasks_of
from tfscale.strategy.extended import local_devices
from tfscale.strategy.settings import check
from tfscale.strategy.strategy import ScaleStrategy


def auto_strategy(**arguments: Any) -> tf.distribute.Strategy:
    """Make the strategy that fits this machine, and log which one and why.

    - A TPU gets TensorFlow's ``TPUStrategy``: tfscale cannot use the links between TPUs.
    - Several workers or several devices get a ``ScaleStrategy``. ``TF_CONFIG`` or a launcher's
      variables list the workers.
    - One device gets TensorFlow's default strategy, which adds no cost.

    Args:
        arguments: arguments of ``ScaleStrategy``; other strategies ignore them, with a warning.

    Example:
        >>> with tfscale.auto_strategy(wire="bf16").scope():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    """
    inspect.signature(ScaleStrategy).bind(**arguments)  # the error names an unknown argument
    check(**arguments)
    policy_of(*(arguments.get(name) for name in ("wire", "method", "error_feedback")))
    if _has_tpu():
        return _said("TPUStrategy", "this machine has a TPU", _tpu_strategy(), arguments)
    wanted = arguments.get("devices")
    join_timeout = arguments.get("join_timeout", DEFAULT_JOIN_TIMEOUT)
    workers = _workers(resolver_of(arguments.get("cluster_resolver"), join_timeout, wanted))
    if workers > 1:  # TensorFlow lists devices only after workers have joined
        why = f"there are {workers} workers"
        return _said("ScaleStrategy", why, ScaleStrategy(**arguments), {})
    devices = local_devices(wanted)[1]
    if len(devices) > 1:
        why = f"there are {len(devices)} devices"
        return _said("ScaleStrategy", why, ScaleStrategy(**arguments), {})
    default = tf.distribute.get_strategy()
    return _said("TensorFlow's default strategy", "there is one device", default, arguments)


def _said(name: str, why: str, strategy: ScaleStrategy, unused: dict[str, Any]) -> Any:
    logging.getLogger("tfscale").info("%s, because %s", name, why)
    if unused:
        without = ", ".join(sorted(unused))
        logging.getLogger("tfscale").warning("%s does not use the arguments %s", name, without)
    return strategy


def _workers(resolver: Any) -> int:
    return len(tasks_of(resolver)) or 1


def _has_tpu() -> bool:
    named = any(os.environ.get(name) for name in ("COLAB_TPU_ADDR", "TPU_NAME"))
    return named or bool(tf.config.list_physical_devices("TPU"))


def _tpu_strategy() -> tf.distribute.Strategy:
    tpu = "" if os.environ.get("COLAB_TPU_ADDR") or os.environ.get("TPU_NAME") else "local"
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
    if not tpu:
        tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)
