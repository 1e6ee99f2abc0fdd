"""Fused updates of LAMB and LARS: one op for a variable, its state and its gradient.

The ops run on CPUs, eagerly and in graphs, but not under XLA. A variable is float32, bfloat16 or
float16, its gradient has the same type, and its state is float32.
``custom_ops/optimizers/update.h`` states the rules.

Numbers that may change with each step are in one small tensor, which all variables share.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.native import library

DTYPES = (tf.float32, tf.bfloat16, tf.float16)


def lamb_numbers(
    learning_rate: Any,
    *,
    beta_1: Any = 0.9,
    beta_2: Any = 0.999,
    correction_1: Any = 1.0,
    correction_2: Any = 1.0,
    epsilon: Any = 1e-6,
    weight_decay: Any = 0.0,
    lower: Any = 0.0,
    upper: Any = float("inf"),
) -> Any:
    """Return the tensor of numbers for ``lamb``; each is a Python number or a scalar tensor.

    Args:
        learning_rate: learning rate of this step.
        beta_1, beta_2: decay rates of the two moments.
        correction_1, correction_2: factors that correct the moments' bias to zero: ``1 / (1 -
            beta ** t)`` in step t, or 1 for no correction. Compute them in float64: 1 - 0.999 in
            float32 has a relative error of 5e-5.
        epsilon: number that is added to the root of the second moment.
        weight_decay: factor of the variable in the direction.
        lower, upper: bounds of the variable's norm in the trust ratio.
    """
    return _pack(
        learning_rate,
        beta_1,
        1.0 - beta_1,
        beta_2,
        1.0 - beta_2,
        correction_1,
        correction_2,
        epsilon,
        weight_decay,
        lower,
        upper,
    )


def lamb(variable: Any, m: Any, v: Any, gradient: Any, numbers: Any, *, adapt: bool = True) -> Any:
    r"""Take one step of LAMB.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \quad
        v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= c_1 m / (\sqrt{c_2 v} + \epsilon) + \lambda w \\
        w &\leftarrow w - \eta \, \phi(\|w\|) / \|u\| \, u, \quad
        \phi(x) = \min(\max(x, \text{lower}), \text{upper})

    The ratio of the norms is 1 if one of them is 0, or without ``adapt``.

    Args:
        variable: the trained ``tf.Variable``, or another object with its ``handle``.
        m, v: moments of the variable, float32.
        gradient: a tensor of the variable's shape and type.
        numbers: result of ``lamb_numbers``.
        adapt: whether the step is scaled by the ratio of the norms.

    Returns:
        The operation, in a graph.

    Example:
        >>> w, m, v = tf.Variable([3.0, 4.0]), tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])
        >>> numbers = lamb_numbers(0.1, correction_1=10.0, correction_2=1000.0)
        >>> lamb(w, m, v, tf.constant([1.0, 1.0]), numbers)
        >>> w.numpy().round(3)  # a step of 0.1 |w| = 0.5, as both directions are 1
        array([2.646, 3.646], dtype=float32)

    Reference:
        You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
        minutes", ICLR 2020, algorithm 2.
    """
    return library.load().tfscale_lamb(
        var=variable.handle, m=m.handle, v=v.handle, grad=gradient, hyper=numbers, adapt=adapt
    )


def lars_numbers(
    learning_rate: Any,
    *,
    momentum: Any = 0.9,
    trust_coefficient: Any = 0.001,
    epsilon: Any = 0.0,
    weight_decay: Any = 0.0,
) -> Any:
    """Return the tensor of numbers for ``lars``; each is a Python number or a scalar tensor.

    Args:
        learning_rate: learning rate of this step.
        momentum: decay rate of the momentum.
        trust_coefficient: factor of the variable's norm in the trust ratio.
        epsilon: number that is added to the denominator of the trust ratio.
        weight_decay: factor of the variable that is added to the gradient.
    """
    return _pack(learning_rate, momentum, trust_coefficient, epsilon, weight_decay)


def lars(
    variable: Any,
    momentum: Any,
    gradient: Any,
    numbers: Any,
    *,
    adapt: bool = True,
    nesterov: bool = False,
    rate_inside: bool = True,
    clip: bool = False,
) -> Any:
    r"""Take one step of LARS.

    .. math::
        r &= \tau \|w\| / (\|g\| + \lambda \|w\| + \epsilon) \\
        m &\leftarrow \mu m + \eta r (g + \lambda w) \\
        w &\leftarrow w - m

    The ratio r is 1 if one of the two norms is 0, or without ``adapt``.

    Args:
        variable: the trained ``tf.Variable``, or another object with its ``handle``.
        momentum: state m of the variable, float32.
        gradient: a tensor of the variable's shape and type.
        numbers: result of ``lars_numbers``.
        adapt: whether the step is scaled by the ratio r.
        nesterov: whether the variable moves by the m of one more step with the same gradient.
        rate_inside: whether the learning rate is inside the momentum, as in the paper; else it
            multiplies the variable's move.
        clip: whether r becomes :math:`\min(r / \eta, 1)`, as in LARC, also without ``adapt``.

    Returns:
        The operation, in a graph.

    Example:
        >>> w, m = tf.Variable([3.0, 4.0]), tf.Variable([0.0, 0.0])
        >>> lars(w, m, tf.constant([0.0, 2.0]), lars_numbers(1.0, trust_coefficient=0.1))
        >>> w.numpy()  # a step of 0.1 |w| = 0.5
        array([3. , 3.5], dtype=float32)

    Reference:
        You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017.
    """
    return library.load().tfscale_lars(
        var=variable.handle,
        momentum=momentum.handle,
        grad=gradient,
        hyper=numbers,
        adapt=adapt,
        nesterov=nesterov,
        rate_inside=rate_inside,
        clip=clip,
    )


def _pack(*numbers: Any) -> Any:
    """Return numbers as a tensor, in the order of ``custom_ops/optimizers/rules.h``."""
    return tf.stack([tf.cast(number, tf.float32) for number in numbers])
