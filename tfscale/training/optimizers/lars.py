"""LARS: SGD with a local learning rate for each variable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import native
from tfscale.bridge.optimizers import ops
from tfscale.support import arguments
from tfscale.training.optimizers import fused as fused_ops, rules
from tfscale.training.optimizers.base import ADAPTATION, DECAY, Optimizer, Patterns, checked_share
from tfscale.training.optimizers.paths import BIAS_AND_NORM

FORMS = ("paper", "popular")


@keras.saving.register_keras_serializable(package="tfscale")
class LARS(Optimizer):
    r"""Layer-wise adaptive rate scaling (You, Gitman, Ginsburg).

    For each variable :math:`w` with gradient :math:`g`:

    .. math::
        \ell &= \tau \frac{\|w\|}{\|g\| + \lambda \|w\| + \epsilon} \\
        m &\leftarrow \mu m + \eta \ell (g + \lambda w) \\
        w &\leftarrow w - m

    with the learning rate :math:`\eta`, the momentum :math:`\mu`, the decay :math:`\lambda` and the
    trust coefficient :math:`\tau`. :math:`\ell` is 1 if :math:`\|w\|` or :math:`\|g\|` is zero, and
    for variables that ``exclude_from_adaptation`` matches: these move as in SGD. :math:`\lambda` is
    0, in both equations, for variables that ``exclude_from_weight_decay`` matches.

    This is the paper's form: the learning rate is inside the momentum, so a new rate applies to new
    gradients only. ``form="popular"`` is the form of most SGD implementations, in which a new rate
    applies to the whole momentum: :math:`m \leftarrow \mu m + \ell (g + \lambda w)` and :math:`w
    \leftarrow w - \eta m`. While :math:`\eta` is constant, both forms give the same result.

    With Nesterov's momentum, :math:`w` moves by :math:`\mu m` (the new :math:`m`) plus one more
    gradient term, instead of :math:`m`.

    ``trust_clip=True`` is LARC: :math:`\ell` becomes :math:`\min(\ell / \eta, 1)`. So the rate of
    an adapted variable is :math:`\min(\ell, \eta)`, at most the learning rate.

    Args:
        learning_rate: :math:`\eta`, a float, a schedule, or a function without arguments.
        momentum: :math:`\mu`.
        nesterov: whether the momentum is Nesterov's.
        weight_decay: :math:`\lambda`; None turns it off.
        trust_coefficient: :math:`\tau`.
        epsilon: a number that is added to the denominator of the local rate.
        form: ``"paper"`` or ``"popular"``.
        trust_clip: whether the local rate is clipped, as in LARC.
        exclude_from_weight_decay: regular expressions, searched in variables' paths; ``()``
            excludes no variable. By default biases, and the scales and offsets of normalization
            layers (``tfscale.optimizers.BIAS_AND_NORM``).
        exclude_from_adaptation: regular expressions of variables without a local rate. The two
            lists are independent.
        fused: None uses a native op where it exists (CPU, outside XLA), True raises where it does
            not exist, False never uses it.
        base: arguments of every Keras optimizer: ``name``, ``clipnorm``, ``clipvalue``,
            ``global_clipnorm``, ``use_ema``, ``ema_momentum``, ``ema_overwrite_frequency``,
            ``loss_scale_factor``, ``gradient_accumulation_steps``.

    Example:
        The norm of the step is a tenth of a thousandth of the norm of the variable:

        >>> import keras, tfscale.optimizers
        >>> w = keras.Variable([3.0, 4.0], name="kernel")
        >>> tfscale.optimizers.LARS(learning_rate=100.0).apply([keras.ops.array([0.0, 2.0])], [w])
        >>> print(w.numpy())
        [3.  3.5]

    Differences from others: models/official and optax divide by :math:`\|g + \lambda w\|`;
    apex and timm have the popular form. docs/optimizers.md has the whole table.

    Reference: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks,
    https://arxiv.org/abs/1708.03888.
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = None,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        form: str = FORMS[0],
        trust_clip: bool = False,
        exclude_from_weight_decay: Patterns = BIAS_AND_NORM,
        exclude_from_adaptation: Patterns = BIAS_AND_NORM,
        fused: bool | None = None,
        **base: Any,
    ) -> None:
        lists = {DECAY: exclude_from_weight_decay, ADAPTATION: exclude_from_adaptation}
        super().__init__(learning_rate, weight_decay, lists, **base)
        self.momentum = checked_share(momentum, "momentum")
        self.nesterov = arguments.flag(nesterov, "nesterov")
        self.trust_coefficient = arguments.real(trust_coefficient, "trust_coefficient", 0)
        self.epsilon = arguments.real(epsilon, "epsilon", 0)
        self.form = arguments.choice(form, "form", FORMS)
        self.trust_clip = arguments.flag(trust_clip, "trust_clip")
        self.fused = arguments.optional(arguments.flag, fused, "fused")

    def build(self, variables: list[Any]) -> None:
        """Make the state, once the variables are known."""
        if not self.built:
            super().build(variables)
            self._momentums = self.add_state("momentum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable."""
        place = self._get_variable_index(variable)
        m = self._momentums[place]
        adapt = not self.excluded(ADAPTATION, place)
        numbers = {
            "learning_rate": ops.cast(learning_rate, m.dtype),
            "momentum": self.momentum,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "weight_decay": self.decay_of(place),
        }
        update = fused_ops.choose("lars", self.fused, variable) or _plain
        update(
            variable,
            m,
            ops.cast(gradient, variable.dtype),
            numbers,
            adapt=adapt,
            nesterov=self.nesterov,
            rate_inside=self.form == "paper",
            clip=self.trust_clip and adapt,
        )

    def get_config(self) -> dict[str, Any]:
        """Return all arguments, in types that JSON knows."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "form": self.form,
            "trust_clip": self.trust_clip,
            "fused": self.fused,
        }


def _plain(
    variable: Any,
    m: Any,
    gradient: Any,
    numbers: dict[str, Any],
    *,
    adapt: bool,
    nesterov: bool,
    rate_inside: bool,
    clip: bool,
) -> None:
    """Update a variable as ``tfscale.native.optimizers.lars`` does."""
    n = SimpleNamespace(**numbers)
    g, w = ops.cast(gradient, m.dtype), ops.cast(variable, m.dtype)
    local = _local_rate(w, g, n) if adapt else 1.0
    if clip:
        local = ops.minimum(local / n.learning_rate, 1.0)
    inside, outside = (n.learning_rate, 1.0) if rate_inside else (1.0, n.learning_rate)
    push = inside * local * rules.decayed(g, w, n.weight_decay)
    if rules.of_one_type(variable, m):
        _move_by_one_op(variable, m, push, n.momentum, outside, nesterov)
        return
    moved = n.momentum * m + push
    m.assign(moved)
    step = n.momentum * moved + push if nesterov else moved
    rules.descend(variable, w, outside * step)


def _move_by_one_op(
    variable: Any, m: Any, push: Any, momentum: float, rate: Any, nesterov: bool
) -> None:
    """Update momentum and variable in one pass over memory."""
    tf.raw_ops.ResourceApplyMomentum(
        var=variable.handle,
        accum=native(m).handle,
        lr=tf.cast(rate, m.dtype),
        grad=push,
        momentum=tf.constant(momentum, m.dtype),
        use_nesterov=nesterov,
    )


def _local_rate(w: Any, g: Any, n: SimpleNamespace) -> Any:
    size, slope = rules.norm(w), rules.norm(g)
    local = n.trust_coefficient * size / (slope + n.weight_decay * size + n.epsilon)
    return rules.where_positive(local, size, slope)
