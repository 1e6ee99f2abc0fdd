"""Spatial averaging: neighbours in a variable share one estimate of their curvature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import path_of
from tfscale.support import arguments
from tfscale.training.optimizers import paths

Rule = str | int | None
Averaging = Rule | Mapping[str, Rule] | Callable[[tf.Tensor, Any], Any]

_AXES: dict[str, Callable[[int], range]] = {
    "window": lambda rank: range(rank - 2),
    "inputs": lambda rank: range(rank - 1),
    "outputs": lambda rank: range(rank - 1, rank),
}

_EXPECTED = (
    '"auto", "window" (over all axes but the last two), "inputs" (over all but the '
    'last), "outputs" (over the last), a number (flat blocks of that length), None (no average), '
    "a dictionary from regular expressions, which are searched in variables' paths, to these, or "
    "a function of a curvature and its variable, which is not a number"
)


def checked(given: Averaging) -> Averaging:
    """Return ``given`` if it is a rule, rules for patterns, or a function; else raise."""
    if callable(given):
        return given
    if isinstance(given, Mapping):
        for pattern in given:
            arguments.pattern(pattern, "a key of averaging")
        return {pattern: _checked_rule(rule) for pattern, rule in given.items()}
    return _checked_rule(given)


def _checked_rule(rule: Rule) -> Rule:
    if rule is None or (isinstance(rule, str) and rule in ("auto", *_AXES)):
        return rule
    return arguments.whole(rule, "averaging", 1, what=_EXPECTED)


def rule_for(averaging: Averaging, variable: Any) -> Rule | Callable[[tf.Tensor, Any], Any]:
    """Return the rule for one variable, or raise if it does not fit the variable's shape.

    Args:
        averaging: the user's argument.
        variable: the variable whose curvature is averaged.
    """
    if callable(averaging):
        return averaging
    path, rank = path_of(variable), len(variable.shape)
    rule = _first_found(averaging, path) if isinstance(averaging, Mapping) else averaging
    if rule == "auto":
        return "window" if rank >= 4 else None
    size = math.prod(variable.shape)
    if isinstance(rule, int) and size % rule:
        raise ValueError(
            f"averaging: blocks of {rule} do not divide the {size} numbers of {path}. Choose a "
            f'divisor, or leave it out: averaging={{"{path}": None}}.'
        )
    if rule == "window" and rank < 3:
        raise ValueError(
            f'averaging: {path} has the shape {tuple(variable.shape)}, and "window" is for kernels '
            'of convolutions. Use "inputs", "outputs", a length of blocks, or None.'
        )
    return rule


def _first_found(rules: Mapping[str, Rule], path: str) -> Rule:
    return next((rule for pattern, rule in rules.items() if paths.found([pattern], path)), "auto")


def averaged(curvature: tf.Tensor, rule: Any, variable: Any) -> tf.Tensor:
    """Return the means of the curvature, in a shape that broadcasts to the variable's.

    Args:
        curvature: the curvature, in the variable's shape.
        rule: the result of ``rule_for``.
        variable: the variable of the curvature.
    """
    if rule is None:
        return curvature
    if callable(rule):
        return tf.cast(rule(curvature, variable), curvature.dtype)
    if isinstance(rule, int):
        blocks = tf.reshape(curvature, (-1, rule))
        means = tf.reduce_mean(blocks, axis=1, keepdims=True)
        return tf.reshape(tf.broadcast_to(means, tf.shape(blocks)), curvature.shape)
    axes = list(_AXES[rule](curvature.shape.rank))
    return tf.reduce_mean(curvature, axis=axes, keepdims=True)
