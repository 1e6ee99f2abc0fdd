"""One worker that trains without recomputation and with it, and prints whether that was the same.

Argument: how many devices it has.
"""

from __future__ import annotations

import sys

import tensorflow as tf

import tfscale
from tests.recompute.models import assert_same_training, residual

if __name__ == "__main__":
    devices = int(sys.argv[1])
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * devices
    )
    strategy = tfscale.ScaleStrategy(algorithm="ring")
    plan = assert_same_training(residual, scope=strategy, optimizer="sgd")
    print("\nSAME", strategy.num_replicas_in_sync, plan.parts, plan.peak, flush=True)
