"""Where callbacks can measure the curvature of the model that trains."""

from __future__ import annotations

import keras


def check(model: keras.Model, who: str) -> None:
    """Refuse workers that would each measure its own part of the data, and disagree."""
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
