"""Errors for models and optimizers that were made outside of a strategy's scope."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfscale.bridge.frames import objects_in
from tfscale.bridge.objects import native, path_of
from tfscale.bridge.protocols import Variable
from tfscale.bridge.tensorflow import DistributedVariable

_SHOWN = 3

_MOVE = """Make it in the scope, too:

    with strategy.scope():
        model = ...
        model.compile(...)"""


BY_REPLICAS = """Put the step, from the tape to the optimizer, into a function, and let every
replica call it with its part of a batch:

    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=(batch,))

Or train by fit. See docs/strategy.md, "Custom loops"."""


def refuse(strategy: tf.distribute.Strategy, what: str, variables: Iterable[Variable]) -> None:
    """Raise if a model or an optimizer has variables that were made outside of the scope.

    Args:
        strategy: strategy in whose scope the variables must be made.
        what: name of the object that holds the variables, such as "the model 'sequential'".
        variables: all variables of that object.
    """
    found = foreign(strategy, variables)
    if not found:
        return
    raise ValueError(
        f"{what} has variables that were made {_where(found[0])}: {_names(found)}. A ScaleStrategy "
        f"keeps a copy of each variable on each replica, and makes all copies at once. "
        f"{_MOVE}"
    )


def foreign(strategy: tf.distribute.Strategy, variables: Iterable[Variable]) -> list[Variable]:
    """Return the variables that were made outside of the scope; none if there is one replica."""
    if strategy.extended.number_of_replicas == 1:
        return []
    return [v for v in variables if _home(v) is not strategy]


@contextlib.contextmanager
def named_by_us(strategy: tf.distribute.Strategy, kind: Any) -> Iterator[None]:
    """Replace TensorFlow's error by ours if an object made outside of the scope caused it.

    Args:
        strategy: strategy whose step runs within this context.
        kind: classes of objects that may hold such variables: Keras's optimizers.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        for one in objects_in(error, kind):
            refuse(strategy, f"the optimizer {one.name!r}", one.variables)
        raise


def refuse_other_scope(strategy: tf.distribute.Strategy) -> None:
    """Raise if a strategy's scope is entered within the scope of another strategy."""
    if not tf.distribute.has_strategy() or tf.distribute.get_strategy() is strategy:
        return
    raise RuntimeError(
        f"a model or a dataset of a {_name(strategy)} was used in the scope of another strategy, a "
        f"{_name(tf.distribute.get_strategy())}. A program may have several strategies, but only "
        "one scope at a time: leave the `with` block of the other strategy first."
    )


def _home(variable: Variable) -> Any:
    value = native(variable)
    return value.distribute_strategy if isinstance(value, DistributedVariable) else None


def _where(variable: Variable) -> str:
    home = _home(variable)
    return "outside of its scope" if home is None else f"in the scope of another {_name(home)}"


def _name(strategy: tf.distribute.Strategy) -> str:
    return type(strategy).__name__


def _names(variables: list[Variable]) -> str:
    paths = [path_of(v) for v in variables]
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
