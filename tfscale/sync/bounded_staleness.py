"""Bounded staleness: replicas apply the sums of gradients some steps later, and do not wait."""

from __future__ import annotations

import dataclasses
import math

from tfscale.support import arguments
from tfscale.sync.every_step import EveryStep
from tfscale.sync.period import checked_count
from tfscale.sync.rule import Rule

MOST = 64


@dataclasses.dataclass(frozen=True, repr=False)
class BoundedStaleness(Rule):
    r"""Bounded staleness: sums of gradients travel behind steps, at most s steps late.

    In step t each replica begins to sum its gradients :math:`g_r(w_t)` with those of the others, in
    the background, and goes on. All replicas apply that sum at the end of step t + s:

    .. math:: w_{t+s+1} = \text{update}(w_{t+s}, \sum_r g_r(w_t)).

    A replica waits only if the sum that it is to apply has not come: if it is s steps ahead of the
    slowest replica. All replicas apply the same sums in the same steps, so their weights have the
    same bits, and a training can be repeated. With s = 0 this is ``EveryStep``.

    A bound hides that a replica is slow now and then. If a replica is always slower, the others are
    soon s steps ahead, and then wait for it as in ``EveryStep``: all make equally many steps. With
    ``skips`` a replica that the others wait for leaves out some of its batches.

    Plain gradient descent on a quadratic with the curvature :math:`\lambda` converges if its
    learning rate is less than :math:`\frac{2}{\lambda} \sin\frac{\pi}{2 (2 s + 1)}`; see
    ``stable_rate``.

    Args:
        bound: s, the number of steps.
        curvature: the largest eigenvalue of the loss's Hessian, if you know it, as
            ``tfscale.curvature`` measures it. A warning then says when the learning rate of a plain
            SGD is too large for the bound.
        skips: whether a replica that others wait for for longer than the bound hides leaves out
            batches. Then these samples are not trained on in this epoch, and a training cannot be
            repeated to the bit, since it depends on times.

    Example:
        >>> strategy = tfscale.ScaleStrategy(sync=tfscale.sync.BoundedStaleness(bound=4))

    Reference: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", 2013.
    """

    bound: int = 4
    curvature: float | None = None
    skips: bool = False

    every = 1  # a sum begins in each step
    sums_gradients = True

    def __post_init__(self) -> None:
        arguments.whole(self.bound, "bound", 0, MOST, what="a number of steps")
        what = "the largest eigenvalue of the Hessian"
        arguments.optional(arguments.real, self.curvature, "curvature", above=0, what=what)
        arguments.flag(self.skips, "skips")
        if self.skips and not self.bound:
            raise ValueError(
                "skips=True needs a bound of 1 or more: a replica learns a step later that others "
                f"have waited for it. Got bound={self.bound}"
            )

    def __repr__(self) -> str:
        """Return the bound, and the settings that differ from their defaults."""
        curvature = "" if self.curvature is None else f", curvature={self.curvature!r}"
        skips = ", skips=True" if self.skips else ""
        return f"BoundedStaleness(bound={self.bound}{curvature}{skips})"

    @property
    def simplest(self) -> Rule:
        """``EveryStep`` for a bound of 0."""
        return self if self.bound else EveryStep()


def stable_rate(bound: int, curvature: float = 1.0) -> float:
    r"""Return the learning rate below which plain SGD converges on a quadratic.

    This is :math:`\frac{2}{\lambda} \sin\frac{\pi}{2 (2 s + 1)}`: with the error e along an
    eigenvector of the Hessian, :math:`e_{t+1} = e_t - \eta \lambda e_{t-s}`, and at this rate a
    root of :math:`z^{s+1} = z^s - \eta \lambda` leaves the unit circle.

    Args:
        bound: s, the number of steps by which gradients are late.
        curvature: :math:`\lambda`, the largest eigenvalue of the Hessian.

    Example:
        >>> [round(tfscale.sync.stable_rate(bound), 3) for bound in (0, 1, 4)]
        [2.0, 1.0, 0.347]
    """
    checked_count(bound, "bound", least=0)
    arguments.real(curvature, "curvature", above=0, what="the largest eigenvalue of the Hessian")
    return 2 / curvature * math.sin(math.pi / (2 * (2 * bound + 1)))
