"""The progress of a training, as its optimizer counts it."""

from __future__ import annotations

import operator
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import given_rate, innermost, optimizers_of
from tfscale.training.schedules.schedule import EPOCHS, STEPS


def window(optimizer: Any) -> int:
    """Return the number of batches of an update."""
    return innermost(optimizer).gradient_accumulation_steps or 1


def updates(optimizer: Any) -> int:
    """Return the number of updates, in this program and before it."""
    return int(number(innermost(optimizer).iterations))


def counting(model: Any) -> tuple[Any, int]:
    """Return the optimizer that counts the batches of a model, and the updates it has made.

    It is the compiled one. But a model with optimizers of its own, as a GAN, may never use that:
    then it is the one of them that has made the fewest updates, as critics make several in a batch.
    """
    compiled = innermost(model.optimizer)
    made = updates(compiled)
    if made:
        return compiled, made
    others = [(one, updates(one)) for one in map(innermost, optimizers_of(model))]
    counted = [(one, number) for one, number in others if number]
    return min(counted, key=operator.itemgetter(1), default=(compiled, 0))


def steps(model: Any) -> int:
    """Return the number of batches trained on, up to the last whole window."""
    optimizer, made = counting(model)
    return made * window(optimizer)


def in_steps(schedule: Any, epoch: int | None, what: str) -> Any:
    """Return a schedule in steps: the given one, or a conversion if it counts epochs.

    Args:
        schedule: a schedule of learning rates, or any function of a step.
        epoch: number of steps of an epoch; None if ``fit`` does not know.
        what: the argument that the schedule was given as.
    """
    if getattr(schedule, "unit", STEPS) != EPOCHS:
        return schedule
    if not epoch:
        raise ValueError(
            f"{schedule!r} counts epochs, and fit doesn't know how many steps one has (data "
            f"from a generator?). Give fit steps_per_epoch=..., or give {what} a schedule in steps"
        )
    return schedule.in_steps(float(epoch))


def check_settable(optimizer: Any, who: str) -> None:
    """Refuse an optimizer whose learning rate a callback cannot set."""
    if hasattr(optimizer, "optimizers"):
        raise ValueError(
            f"{who} sets one learning rate, and {type(optimizer).__name__} has one for each of "
            "its optimizers. Give each of them a schedule of tfscale.schedules as learning_rate"
        )
    if not isinstance(given_rate(optimizer), keras.Variable):
        raise ValueError(
            f"{who} sets optimizer.learning_rate, and the optimizer has "
            f"{given_rate(optimizer)!r} there, which sets it itself. Compile with a number "
            f"as learning_rate, or leave {who} out"
        )


def number(variable: Any) -> float:
    """Return the value of a variable that may have a copy on each replica."""
    return float(tf.convert_to_tensor(variable).numpy())
