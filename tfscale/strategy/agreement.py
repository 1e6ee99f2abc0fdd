"""Check at the end of ``fit`` that a user's own rule or method has left all replicas equal.

tfscale's own rules and methods do so by their design and tests. A user's class can break this
without an error: each replica then trains a model of its own, and the program saves one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.hooks import AGREEMENT
from tfscale.bridge.objects import native
from tfscale.bridge.tensorflow import PerReplica
from tfscale.compression.method import Method
from tfscale.compression.switching import Switching
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.variables import Weight
from tfscale.sync.rule import Rule

_OWN = "tfscale."
_BITS = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64}
_RULE = (
    "A rule must make all weights equal in end(round), or in settle(round) if the rule has "
    "agrees=False. Assign exactly what round.mean returns, or what the rule keeps: a replica that "
    "adds a difference to its own weight ends with other digits. The section 'A sync rule' of "
    "docs/contributing.md has an example."
)
_METHOD = (
    "A method's sums(load) must return the same numbers on all replicas: results of "
    "load.all_reduce or load.all_gather, or numbers that are computed from such results alone. "
    "Don't return load.gradients, which differ. The section 'A method' of docs/contributing.md has "
    "an example."
)


def check_at_the_end(strategy: Strategy, model: keras.Model) -> None:
    """Make the ``fit`` that begins compare all replicas' weights at its end.

    This does nothing if the rule and all methods are tfscale's: their tests show that they agree.
    """
    if strategy.extended.number_of_replicas == 1:
        return
    advice = _advice(strategy)
    optimizer = model.optimizer
    if not advice or optimizer is None:
        return
    AGREEMENT.off(optimizer)  # an interrupted fit may have left its hook
    AGREEMENT.put(optimizer, functools.partial(_finalize_and_check, strategy, model, advice))


def _finalize_and_check(
    strategy: Strategy,
    model: keras.Model,
    advice: str,
    finalize: Callable[..., None],
    optimizer: Any,
    variables: Any,
) -> None:
    AGREEMENT.off(optimizer)
    finalize(optimizer, variables)
    _check(strategy, model, advice)


def _advice(strategy: Strategy) -> str:
    """Return which rule and methods are a user's, and what they must do; empty if none is."""
    rules = [strategy.sync] if _is_users(strategy.sync.round_rule) else []
    methods = dict.fromkeys(
        part
        for reducer in strategy.reducers
        for method in reducer.policy.methods
        for part in _parts(method)
        if _is_users(part)
    )
    found: list[tuple[Sequence[Rule | Method], str]] = [(rules, _RULE), (list(methods), _METHOD)]
    return " ".join(
        f"{', '.join(map(repr, own))} caused this. {todo}" for own, todo in found if own
    )


def _is_users(thing: Rule | Method) -> bool:
    return not type(thing).__module__.startswith(_OWN)


def _parts(method: Method) -> list[Method]:
    """Return a method and all methods that it is made of."""
    variants = method.variants if isinstance(method, Switching) else ()
    return [method, *(part for variant in variants for part in _parts(variant))]


def _check(strategy: Strategy, model: keras.Model, advice: str) -> None:
    """Raise ``RuntimeError``, on all workers alike, if replicas have different weights."""
    weights = [v for v in map(native, model.trainable_variables) if isinstance(v, Weight)]
    if not weights:
        return
    local = range(len(strategy.extended.worker_devices))
    rows = [[_digest(v.values[replica]) for v in weights] for replica in local]
    table = strategy.gather(PerReplica(tuple(tf.stack([row]) for row in rows)), axis=0).numpy()
    differs = table != table[0]
    if not differs.any():
        return
    names = [v.path for v in model.trainable_variables if isinstance(native(v), Weight)]
    wrong = [name for name, column in zip(names, differs.T, strict=True) if column.any()]
    others = [replica for replica, row in enumerate(differs) if row.any()]
    more = f" (and of {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    raise RuntimeError(
        f"at the end of fit, replicas {others} have other values of the weight {wrong[0]!r}{more} "
        f"than replica 0, but all replicas must have the same values. {advice}"
    )


def _digest(variable: tf.Variable) -> tf.Tensor:
    """Return an int64 that differs, in all likelihood, if any bit of the variable differs."""
    with tf.device(variable.device):
        value = variable.read_value()
        bits = tf.reshape(tf.cast(tf.bitcast(value, _BITS[value.dtype.size]), tf.int64), [-1])
        return tf.reduce_sum(bits * (2 * tf.range(tf.size(bits, tf.int64)) + 1))
