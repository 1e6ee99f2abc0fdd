"""Warnings of parts of a model that several replicas cannot train as one device does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import keras

from tfscale.bridge.protocols import Layer

if TYPE_CHECKING:
    from tfscale.strategy.strategy import ScaleStrategy


_told: set[str] = set()


def warn(strategy: ScaleStrategy, layers: list[Layer]) -> None:
    """Warn of inexact layers, while a training step for several replicas is traced."""
    for sentence in _reasons(strategy, layers):
        tell(sentence)


def tell(sentence: str) -> None:
    """Log a sentence on a difference from one device, once for each sentence."""
    if sentence not in _told:
        _told.add(sentence)
        logging.getLogger("tfscale").warning("not as on one device: %s", sentence)


def _reasons(strategy: ScaleStrategy, layers: list[Layer]) -> Iterator[str]:
    replicas = strategy.extended.number_of_replicas
    local = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    if local and not strategy.synchronizes_batch_norm:
        yield (
            f"with batch_norm='local' {_names(local)} normalize by one replica's samples, "
            f"{replicas} times fewer than the batch has, so their statistics have "
            f"{replicas**0.5:.2g} times the noise. batch_norm='synchronized' is exact."
        )
    stateful = [layer for layer in layers if getattr(layer, "stateful", False)]
    if stateful:
        yield (
            f"{_names(stateful)} keep a state for each place in the batch, and each of the "
            f"{replicas} replicas has its own places. Give each sequence the same place in every "
            "batch, in batches that divide evenly; or use stateful=False."
        )


def warn_of_a_number(name: str) -> None:
    """Warn of a loss object that returns one number for all samples of a replica."""
    tell(
        f"the loss {name!r} gives one number for all samples. tfscale takes it for their mean, "
        "which is wrong if the loss divides by a mask or by weights. To be exact, let it return "
        "one number for each sample."
    )


def _names(layers: list[Layer]) -> str:
    names = [layer.name for layer in layers]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
