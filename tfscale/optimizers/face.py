"""The Keras that is installed, as optimizers see it: its optimizer and its ops."""

from __future__ import annotations

import keras

from tfscale.keras_objects import KERAS_2

if KERAS_2:
    from tfscale.optimizers.keras2 import Optimizer, ops
else:
    from keras import ops  # type: ignore[no-redef]
    from keras.optimizers import Optimizer  # type: ignore[no-redef]

__all__ = ["Optimizer", "backend", "ops"]


def backend() -> str:
    """What Keras computes with."""
    return "tensorflow" if KERAS_2 else str(keras.config.backend())
