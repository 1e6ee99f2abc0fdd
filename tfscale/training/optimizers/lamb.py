"""LAMB: Adam with a trust ratio for each variable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras

from tfscale.bridge.optimizers import ops
from tfscale.support import arguments
from tfscale.training.optimizers import fused as fused_ops, rules
from tfscale.training.optimizers.base import ADAPTATION, DECAY, Optimizer, Patterns, checked_share
from tfscale.training.optimizers.paths import BIAS_AND_NORM


class _StepNumbers(NamedTuple):
    """Numbers that all variables need in a step, computed once; they replace the learning rate.

    Keras and TensorFlow give each ``update_step`` on each replica its part of the arguments. An
    attribute would be shared by all replicas of a process, which trace at the same time.
    """

    learning_rate: Any
    correction_1: Any
    correction_2: Any


@keras.saving.register_keras_serializable(package="tfscale")
class LAMB(Optimizer):
    r"""Layer-wise adaptive moments for batch training (You et al.).

    For each variable :math:`w` with gradient :math:`g`, at step :math:`t` (from 1):

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta \frac{\phi(\|w\|)}{\|u\|} u

    with the learning rate :math:`\eta`, the decay :math:`\lambda`, and :math:`\phi` the identity,
    or clipping to ``trust_bounds``. The ratio is 1 if :math:`\|w\|` or :math:`\|u\|` is zero, and
    for variables that ``exclude_from_adaptation`` matches. :math:`\lambda` is 0 for variables that
    ``exclude_from_weight_decay`` matches.

    The two lists are independent. By default both match biases and the scales and offsets of
    normalization layers (``tfscale.optimizers.BIAS_AND_NORM``).

    To clip by the norm of all gradients, as the authors do for BERT, use Keras's
    ``global_clipnorm=1.0``. Under ``tfscale.ScaleStrategy`` it clips the sum of all replicas.

    Args:
        learning_rate: :math:`\eta`, a float, a schedule, or a function without arguments.
        beta_1: :math:`\beta_1`.
        beta_2: :math:`\beta_2`.
        epsilon: a number that is added to the root, after the bias correction.
        weight_decay: :math:`\lambda`; None turns it off.
        bias_correction: False leaves the factors :math:`1 - \beta^t` out.
        trust_bounds: the smallest and the largest :math:`\phi(\|w\|)`; None does not clip.
        exclude_from_weight_decay: regular expressions, searched in variables' paths; ``()``
            excludes no variable.
        exclude_from_adaptation: regular expressions of variables without a trust ratio.
        fused: None uses a native op where it exists (CPU, outside XLA), True raises where it does
            not exist, False never uses it.
        base: arguments of every Keras optimizer: ``name``, ``clipnorm``, ``clipvalue``,
            ``global_clipnorm``, ``use_ema``, ``ema_momentum``, ``ema_overwrite_frequency``,
            ``loss_scale_factor``, ``gradient_accumulation_steps``.

    Example:
        Both numbers move by a tenth of the norm 5, divided between the two:

        >>> import keras, tfscale.optimizers
        >>> w = keras.Variable([3.0, 4.0], name="kernel")
        >>> tfscale.optimizers.LAMB(learning_rate=0.1).apply([keras.ops.array([1.0, 2.0])], [w])
        >>> print(w.numpy().round(4))
        [2.6464 3.6464]

    Differences from others: ``keras.optimizers.Lamb`` decays outside the trust ratio, and
    adapts all variables; ``tfa.optimizers.LAMB`` uses one list for both by default.
    docs/optimizers.md has the whole table.

    Reference: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes, https://arxiv.org/abs/1904.00962.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = None,
        bias_correction: bool = True,
        trust_bounds: Sequence[float] | None = None,
        exclude_from_weight_decay: Patterns = BIAS_AND_NORM,
        exclude_from_adaptation: Patterns = BIAS_AND_NORM,
        fused: bool | None = None,
        **base: Any,
    ) -> None:
        lists = {DECAY: exclude_from_weight_decay, ADAPTATION: exclude_from_adaptation}
        super().__init__(learning_rate, weight_decay, lists, **base)
        self.beta_1 = checked_share(beta_1, "beta_1")
        self.beta_2 = checked_share(beta_2, "beta_2")
        self.epsilon = arguments.real(epsilon, "epsilon", 0)
        self.bias_correction = arguments.flag(bias_correction, "bias_correction")
        self.trust_bounds = _bounds(trust_bounds)
        self.fused = arguments.optional(arguments.flag, fused, "fused")

    def build(self, variables: list[Any]) -> None:
        """Make the state, once the variables are known."""
        if not self.built:
            super().build(variables)
            self._momentums = self.add_state("momentum")
            self._velocities = self.add_state("velocity")

    def _backend_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> None:
        """Replace ``learning_rate``, which Keras hands on to each ``update_step``."""
        super()._backend_update_step(grads, variables, self._step_numbers(learning_rate))

    def _step_numbers(self, learning_rate: Any) -> _StepNumbers:
        dtype = self.exact_dtype
        step = ops.cast(self.iterations + 1, dtype)
        correct = rules.bias_correction if self.bias_correction else rules.no_correction
        rate = ops.cast(learning_rate, dtype)
        return _StepNumbers(rate, correct(self.beta_1, step), correct(self.beta_2, step))

    def update_step(self, gradient: Any, variable: Any, learning_rate: _StepNumbers) -> None:
        """Update a variable, with the numbers that replace the learning rate."""
        place = self._get_variable_index(variable)
        m, v = self._momentums[place], self._velocities[place]
        step_numbers = _StepNumbers(*(ops.cast(x, m.dtype) for x in learning_rate))
        lower, upper = self.trust_bounds or (0.0, math.inf)
        numbers = {
            "learning_rate": step_numbers.learning_rate,
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "correction_1": step_numbers.correction_1,
            "correction_2": step_numbers.correction_2,
            "epsilon": self.epsilon,
            "weight_decay": self.decay_of(place),
            "lower": lower,
            "upper": upper,
        }
        adapt = not self.excluded(ADAPTATION, place)
        update = fused_ops.choose("lamb", self.fused, variable) or _plain
        update(variable, m, v, ops.cast(gradient, variable.dtype), numbers, adapt=adapt)

    def get_config(self) -> dict[str, Any]:
        """Return all arguments, in types that JSON knows."""
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "bias_correction": self.bias_correction,
            "trust_bounds": None if self.trust_bounds is None else list(self.trust_bounds),
            "fused": self.fused,
        }


def _plain(
    variable: Any, m: Any, v: Any, gradient: Any, numbers: dict[str, Any], *, adapt: bool
) -> None:
    """Update a variable as ``tfscale.native.optimizers.lamb`` does."""
    n = SimpleNamespace(**numbers)
    g, w = ops.cast(gradient, m.dtype), ops.cast(variable, m.dtype)
    m.assign_add((1 - n.beta_1) * (g - m))
    v.assign_add((1 - n.beta_2) * (ops.square(g) - v))
    # The corrections become one factor of the update: less memory traffic.
    root = ops.sqrt(n.correction_2)
    scale = n.correction_1 / root
    part = m / (ops.sqrt(v) + n.epsilon / root)
    if n.weight_decay:
        part = part + (n.weight_decay / scale) * w
    ratio = _trust_ratio(w, scale * rules.norm(part), n.lower, n.upper) if adapt else 1.0
    rules.descend(variable, w, (n.learning_rate * ratio * scale) * part)


def _trust_ratio(w: Any, change: Any, lower: float, upper: float) -> Any:
    size = rules.norm(w)
    return rules.where_positive(ops.clip(size, lower, upper) / change, size, change)


def _bounds(given: Sequence[float] | None) -> tuple[float, float] | None:
    if given is None:
        return None
    expected = "a pair of the least and the largest norm that counts, such as (0.0, 10.0)"
    least, largest = arguments.items(given, "trust_bounds", expected, _norm, least=2, most=2)
    if least > largest:
        raise arguments.wrong(given, "trust_bounds", expected)
    return least, largest


def _norm(value: float, name: str) -> float:
    return arguments.real(value, name, 0, math.inf, what="a norm")
