"""The base class of tfscale's optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfscale.analysis.curvature.derivatives import dense
from tfscale.bridge import optimizers as bridge
from tfscale.bridge.installed import backend
from tfscale.bridge.objects import native, path_of
from tfscale.support import arguments
from tfscale.training.optimizers import paths

Patterns = Iterable[str] | str | None

DECAY = "exclude_from_weight_decay"
ADAPTATION = "exclude_from_adaptation"


class Optimizer(bridge.Optimizer):
    """A Keras optimizer with lists of exclusions, exact state, and its own weight decay.

    - **Lists.** A list holds regular expressions, which are searched in the paths of variables.
      Lists are arguments, so they are saved with the model. If a pattern matches no variable's
      path, a warning says so once.
    - **State and arithmetic** are float32 also for float16 and bfloat16 variables, and float64 for
      float64 variables. An update is rounded once, when the variable is assigned.
    - **Weight decay** is part of the rule of each optimizer. Keras's own decay, which shrinks
      variables before the update, is not used.
    - **Sparse gradients** become dense first, and rows that occur several times are summed.
      Momentum moves all rows in every step, and norms are those of whole variables: skipping rows
      that a batch does not touch would be another rule. Clipping sees the dense gradients.

    Args:
        learning_rate: as in Keras: a float, a schedule, or a function without arguments.
        weight_decay: strength of the decay; None or 0 turns it off.
        exclusions: lists by the names of their arguments; ``DECAY`` must be one of them.
        base: arguments of every Keras optimizer: ``name``, ``clipnorm``, ``clipvalue``,
            ``global_clipnorm``, ``use_ema``, ``ema_momentum``, ``ema_overwrite_frequency``,
            ``loss_scale_factor``, ``gradient_accumulation_steps``.
    """

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float | None,
        exclusions: dict[str, Patterns],
        **base: Any,
    ) -> None:
        if backend() != "tensorflow":
            raise RuntimeError(
                "the optimizers of tfscale need Keras's TensorFlow backend, and this is "
                f"{backend()!r}. Set the environment variable "
                "KERAS_BACKEND=tensorflow before Keras is imported."
            )
        weight_decay = arguments.optional(arguments.real, weight_decay, "weight_decay", 0)
        if not callable(learning_rate):
            what = "a number, a schedule, or a function without arguments"
            learning_rate = float(arguments.real(learning_rate, "learning_rate", 0, what=what))
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, **base)
        self._exclusions = {name: paths.checked(name, given) for name, given in exclusions.items()}

    def excluded(self, argument: str, place: int) -> bool:
        """Return whether a list excludes the variable at this place in those given to ``build``."""
        path = path_of(self._trainable_variables[place])
        return paths.found(self._exclusions[argument], path)

    def decay_of(self, place: int) -> float:
        """Return the weight decay of the variable at this place among those given to ``build``."""
        return 0.0 if self.excluded(DECAY, place) else float(self.weight_decay or 0)

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Replace the list of the argument with this name, as Keras's method does.

        Args:
            var_list: variables.
            var_names: regular expressions.
        """
        if self.built:
            raise ValueError(
                f"{DECAY} was called after the optimizer was built for "
                f"{len(self._trainable_variables)} variables. Call it before, or give the "
                f"constructor the list {DECAY}=[...]."
            )
        these = [paths.exactly(path_of(variable)) for variable in var_list or ()]
        patterns = paths.checked(DECAY, [*(var_names or ()), *these])
        self._exclusions = {**self._exclusions, DECAY: patterns}

    def build(self, variables: list[Any]) -> None:
        """Note the variables, once they are known; ``add_state`` may be called afterwards."""
        super().build(variables)
        for argument, patterns in self._exclusions.items():
            warn_of_idle(argument, patterns, variables)

    @property
    def exact_dtype(self) -> str:
        """The type that is exact enough for all variables."""
        return max((_exact(variable) for variable in self._trainable_variables), default="float32")

    def add_state(self, name: str) -> list[Any]:
        """Make a variable of zeros for each of the variables given to ``build``."""
        return [self._zeros_like(variable, name) for variable in self._trainable_variables]

    def _zeros_like(self, variable: Any, name: str) -> Any:
        if self._overwrite_variable_with_gradient(variable):
            return None
        own = native(variable)
        with tf.distribute.get_strategy().extended.colocate_vars_with(own):
            return self.add_variable(
                shape=variable.shape,
                dtype=_exact(own),
                name=f"{path_of(variable).replace('/', '_')}_{name}",
            )

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update the variables, as in any Keras optimizer."""
        known = trainable_variables is None
        variables = self._trainable_variables if known else list(trainable_variables)
        grads = list(grads)
        if len(grads) == len(variables):  # otherwise Keras raises
            grads = [dense(g, v) for g, v in zip(grads, variables, strict=True)]
        super().apply(grads, None if known else variables)

    def _apply_weight_decay(self, variables: Any) -> None:
        """Do nothing instead of Keras's own decay: each rule has its own."""

    def get_config(self) -> dict[str, Any]:
        """Return all arguments, in types that JSON knows."""
        lists = {name: list(patterns) for name, patterns in self._exclusions.items()}
        return {**super().get_config(), **lists}


def warn_of_idle(argument: str, patterns: Iterable[str], variables: Iterable[Any]) -> None:
    """Warn of patterns that match no path, since they may be misspelt."""
    known = [path_of(variable) for variable in variables]
    for pattern in paths.idle(patterns, known):
        logging.getLogger("tfscale").warning(
            "%s: %r is found in no variable's path; paths are %s%s",
            argument, pattern, ", ".join(known[:4]), ", ..." if len(known) > 4 else "",
        )  # fmt: skip


def _exact(variable: Any) -> str:
    return "float64" if tf.as_dtype(variable.dtype) == tf.float64 else "float32"


def checked_share(value: float, name: str) -> float:
    """Return a decay rate of a running mean, or raise."""
    return arguments.real(value, name, 0, below=1)
