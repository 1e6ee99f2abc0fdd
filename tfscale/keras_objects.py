"""What is asked of Keras's variables and optimizers, whichever Keras is installed."""

from __future__ import annotations

from typing import Any

import keras

KERAS_2 = keras.__version__.startswith("2.")


def path_of(variable: Any) -> str:
    """What patterns are searched in: a Keras variable's path, another's name."""
    return str(getattr(variable, "path", None) or variable.name.split(":")[0])


def native(variable: Any) -> Any:
    """TensorFlow's own variable."""
    return variable if KERAS_2 or not isinstance(variable, keras.Variable) else variable.value


def innermost(optimizer: Any) -> Any:
    """The optimizer that has rate and steps, behind those that scale the loss."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer
