"""How far a training is, as its optimizer knows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import innermost


def window(optimizer: Any) -> int:
    """How many batches make one update."""
    return innermost(optimizer).gradient_accumulation_steps or 1


def updates(optimizer: Any) -> int:
    """How many updates were made, in this program or before it."""
    return int(number(innermost(optimizer).iterations))


def number(variable: Any) -> float:
    """The value of a variable that may have a copy on each replica."""
    return float(tf.convert_to_tensor(variable).numpy())
