"""The Keras that is installed, as optimizers see it: its optimizer, its ops, its variables."""

from __future__ import annotations

from typing import Any

import keras

KERAS_2 = keras.__version__.startswith("2.")

if KERAS_2:
    from tfscale.optimizers.keras2 import Optimizer, ops
else:
    from keras import ops  # type: ignore[no-redef]
    from keras.optimizers import Optimizer  # type: ignore[no-redef]

__all__ = ["KERAS_2", "Optimizer", "backend", "native", "ops"]


def backend() -> str:
    """What Keras computes with."""
    return "tensorflow" if KERAS_2 else str(keras.config.backend())


def native(variable: Any) -> Any:
    """TensorFlow's own variable."""
    return variable if KERAS_2 or not isinstance(variable, keras.Variable) else variable.value
