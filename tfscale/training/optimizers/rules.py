"""Mathematics that several optimizers share."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfscale.bridge.optimizers import ops


def norm(x: Any) -> Any:
    r"""Return the Euclidean norm of all numbers of a tensor, :math:`\sqrt{\sum_i x_i^2}`.

    Squares are computed in float64, as in the fused ops: in float32 the square of 1e20 is Inf, and
    that of 1e-23 is 0.
    """
    squares = 2 * tf.nn.l2_loss(tf.cast(x, tf.float64))  # l2_loss halves the squares
    return tf.cast(tf.sqrt(squares), x.dtype)


def where_positive(ratio: Any, *norms: Any) -> Any:
    """Return a ratio of norms if all these norms are above zero, and 1 otherwise.

    So a variable that is still zero, or whose gradient is zero, moves at the plain learning rate.
    """
    for one in norms:
        ratio = ops.where(one > 0, ratio, ops.ones_like(ratio))
    return ratio


def bias_correction(beta: float, step: Any) -> Any:
    r"""Return the factor at step :math:`t` (from 1) of a running mean that began at zero.

    .. math:: \frac{1}{1 - \beta^t} = \frac{-1}{\mathrm{expm1}(t \ln \beta)}

    The second form keeps its digits in float32, while :math:`1 - 0.999` loses four of them.
    """
    if beta == 0:
        return ops.ones_like(step)
    return -1.0 / ops.expm1(step * math.log(beta))


def no_correction(beta: float, step: Any) -> Any:
    """Return 1, in place of ``bias_correction``."""
    return ops.ones_like(step)


def decayed(x: Any, w: Any, decay: float) -> Any:
    r"""Add weight decay to a gradient or an update, :math:`x + \lambda w`."""
    return x + decay * w if decay else x


def of_one_type(x: Any, y: Any) -> bool:
    """Return whether two tensors or variables, TensorFlow's or Keras's, have the same type."""
    return bool(tf.as_dtype(x.dtype) == tf.as_dtype(y.dtype))


def descend(variable: Any, w: Any, step: Any) -> None:
    """Move a variable, whose value in the step's type is ``w``; the result is rounded once."""
    if of_one_type(variable, w):
        variable.assign_sub(step)  # in place
    else:
        variable.assign(ops.cast(w - step, variable.dtype))
