"""Warnings of parts of a model that several replicas cannot train as one device does."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import keras

from tfscale.bridge.objects import innermost, measures_curvature, optimizers_of
from tfscale.bridge.protocols import Layer, Model

_warned: set[str] = set()


def warn(layers: list[Layer], replicas: int, synchronizes_batch_norm: bool) -> None:
    """Warn of inexact layers, while a training step for several replicas is traced."""
    for sentence in _reasons(layers, replicas, synchronizes_batch_norm):
        warn_once(sentence)


def warn_once(sentence: str) -> None:
    """Log a sentence on a difference from one device, once for each sentence."""
    if sentence not in _warned:
        _warned.add(sentence)
        logging.getLogger("tfscale").warning("not as on one device: %s", sentence)


def _reasons(layers: list[Layer], replicas: int, synchronizes_batch_norm: bool) -> Iterator[str]:
    local = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    if local and not synchronizes_batch_norm:
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
    warn_once(
        f"the loss {name!r} gives one number for all samples. tfscale takes it for their mean, "
        "which is wrong if the loss divides by a mask or by weights. To be exact, let it return "
        "one number for each sample."
    )


def warn_of_curvature(model: Model) -> None:
    """Warn of a loss that is no sum over samples, if an optimizer measures its curvature."""
    if any(measures_curvature(innermost(optimizer)) for optimizer in optimizers_of(model)):
        warn_once(
            f"the loss of {model.name!r} ({type(model).__name__}) is a function of a mean, such as "
            "its root, and its optimizer measures curvature. On several replicas the curvature "
            "leaves out the second derivative of that function. Take a loss that is a mean or a "
            "sum over samples, or another optimizer."
        )


def warn_of_changed_gradients(model: Model) -> None:
    """Warn of a step that changes gradients of which each replica has a part."""
    warn_once(
        f"the train_step of {model.name!r} ({type(model).__name__}) changes gradients before an "
        "optimizer gets them that measures curvature. So each replica changes its part of the "
        "gradient, and the sum of these is something else, unless the change only multiplies by a "
        "number. Let the optimizer do it, as by clipnorm or global_clipnorm."
    )


def _names(layers: list[Layer]) -> str:
    names = [layer.name for layer in layers]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
