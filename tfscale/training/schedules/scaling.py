"""Rules that convert the learning rate for one batch size into that for another."""

from __future__ import annotations

from collections.abc import Callable

from tfscale.support import arguments


def linear_scaling(rate: float, base_batch: int, batch: int) -> float:
    r"""Scale a rate by the linear scaling rule, for SGD with momentum.

    .. math:: \eta = \eta_0 \frac{B}{B_0}

    Args:
        rate: :math:`\eta_0`, the learning rate that is right for ``base_batch``.
        base_batch: :math:`B_0`, the number of samples of an update at ``rate``.
        batch: :math:`B`, the new number of samples of an update: the global batch, times
            ``gradient_accumulation_steps``.

    Example:
        >>> print(linear_scaling(0.1, base_batch=256, batch=8192))
        3.2

    Reference: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour,
    section 2.1, https://arxiv.org/abs/1706.02677.
    """
    return arguments.real(rate, "rate", 0) * _ratio(base_batch, batch)


def square_root_scaling(rate: float, base_batch: int, batch: int) -> float:
    r"""Scale a rate by the square-root scaling rule, for LAMB and Adam.

    .. math:: \eta = \eta_0 \sqrt{\frac{B}{B_0}}

    Args:
        rate: :math:`\eta_0`, the learning rate that is right for ``base_batch``.
        base_batch: :math:`B_0`, the number of samples of an update at ``rate``.
        batch: :math:`B`, the new number of samples of an update: the global batch, times
            ``gradient_accumulation_steps``.

    Example:
        >>> print(square_root_scaling(0.005, base_batch=32768, batch=8192))
        0.0025

    Reference: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes, section 4.3, https://arxiv.org/abs/1904.00962.
    """
    return float(arguments.real(rate, "rate", 0) * _ratio(base_batch, batch) ** 0.5)


def _ratio(base_batch: int, batch: int) -> float:
    return checked_batch(batch, "batch") / checked_batch(base_batch, "base_batch")


def checked_batch(batch: int, name: str) -> int:
    """Return a batch size, or raise."""
    return arguments.whole(batch, name, 1, what="a number of samples")


RULES: dict[str, Callable[[float, int, int], float]] = {
    "linear": linear_scaling,
    "square root": square_root_scaling,
}
