"""Where curvature can be measured: products are summed over the devices of one process."""

from __future__ import annotations

import keras


def check(model: keras.Model, who: str) -> None:
    """Refuse workers that would each measure a part of the data, and disagree."""
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return  # without a strategy there is no list of devices
    here = len(strategy.extended.worker_devices)
    if replicas > here:
        raise ValueError(
            f"{who} measures in one process, on all of its devices, and {replicas} replicas train "
            f"in several processes, {here} in this one. Train in one process, or leave {who} out"
        )
