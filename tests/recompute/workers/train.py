"""One worker that trains without recomputation and with it, and prints whether that was the same.

It computes segments again, random results at random moments, and what is cheapest for a budget. A
GAN, whose steps apply gradients twice, computes random results again.

Argument: how many devices it has.
"""

from __future__ import annotations

import sys

import tensorflow as tf

import tfscale
from tests.recompute import phases
from tests.recompute.models import assert_same_training, chain, residual
from tests.recompute.orders import RandomOrder
from tfscale.callbacks import Recompute

if __name__ == "__main__":
    devices = int(sys.argv[1])
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * devices
    )
    strategy = tfscale.ScaleStrategy(algorithm="ring")
    settings = {"scope": strategy, "optimizer": "sgd"}
    plan = assert_same_training(residual, **settings)
    assert_same_training(residual, RandomOrder(seed=1), **settings)
    cheapest = Recompute(fraction=0.7, verbose=0, seconds=4)
    best = assert_same_training(lambda: chain(depth=6, shape=(64, 64)), cheapest, **settings)
    assert best.events is not None, "the plan has segments, which were tested already"
    several = phases.assert_same_training(phases.Gan, RandomOrder(seed=1), scope=strategy)
    assert [bool(one.again) for one in several.phases] == [True, True]
    print("\nSAME", strategy.num_replicas_in_sync, plan.parts, plan.peak, flush=True)
