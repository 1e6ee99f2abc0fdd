"""Elastic averaging: replicas train alone, and then move toward a common centre."""

from __future__ import annotations

import dataclasses

from tfscale.support import arguments
from tfscale.sync.period import Period, checked_period
from tfscale.sync.rule import Round, Rule, assign

CENTRE = "centre"


@dataclasses.dataclass(frozen=True, repr=False)
class ElasticAveraging(Rule):
    r"""Elastic averaging SGD: replicas stay different, and move toward a centre that follows them.

    Each of P replicas makes H steps of the model's optimizer, alone. Then, with the centre c and
    :math:`d_r = w_r - c`, the replicas and the centre move at the same time:

    .. math:: w_r \leftarrow w_r - \alpha d_r, \qquad c \leftarrow c + \alpha \sum_r d_r.

    Evaluations and files use the centre. Each replica holds a P-th of the centre, its shard. A
    round gathers the shards of c, and each replica adds the sum of all differences to its own
    shard. Replicas send both as fp32. Together these are as many bytes as the mean of all weights.

    Args:
        every: H, the number of steps in a round; or a ``Period``.
        alpha: :math:`\alpha`, the strength of the pull between replicas and centre. If
            :math:`\alpha (P + 1)` is 2 or more, the weights diverge, so the rule raises an error;
            from 1 on they oscillate. The paper takes 0.9 / P.

    Example:
        >>> strategy = tfscale.ScaleStrategy(sync=tfscale.sync.ElasticAveraging(10, alpha=0.1))

    Reference: Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", 2015.
    """

    every: int | Period = 10
    alpha: float = 0.1

    keeps = kept_weights = in_shards = (CENTRE,)
    reads_as = CENTRE
    agrees = False

    def __post_init__(self) -> None:
        checked_period(self.every)
        arguments.real(self.alpha, "alpha", above=0, most=1)

    def check(self, replicas: int) -> None:
        """Raise ``ValueError`` if the weights of this number of replicas would diverge."""
        if self.alpha * (replicas + 1) >= 2:
            raise ValueError(
                f"alpha={self.alpha} is too large for {replicas} replicas, which would move ever "
                f"further from their centre: alpha times {replicas + 1} must be less than 2. Take "
                f"alpha={0.9 / replicas:.3g}, which is 0.9 / {replicas} as in the paper"
            )

    def begin(self, round: Round) -> None:
        """Keep the weights, which are the same on all replicas, as the centre."""
        round.keep(CENTRE, [weight.read_value() for weight in round.weights])

    def end(self, round: Round) -> None:
        """Move each replica toward the centre, and the centre toward all replicas."""
        centre = round.kept(CENTRE)
        pulls = [
            self.alpha * (w.read_value() - c) for w, c in zip(round.weights, centre, strict=True)
        ]
        for weight, pull in zip(round.weights, pulls, strict=True):
            weight.assign_sub(pull)
        round.add(CENTRE, pulls)

    def settle(self, round: Round) -> None:
        """Replace the weights with the centre."""
        assign(round, round.kept(CENTRE))
