"""Local SGD: replicas train alone, and then take the mean of their weights."""

from __future__ import annotations

import dataclasses

from tfscale.support import arguments
from tfscale.sync.period import Period, checked_count, checked_period
from tfscale.sync.rule import Round, Rule, assign

_PARTS = ("weights", "optimizer")


@dataclasses.dataclass(frozen=True, repr=False)
class LocalSGD(Rule):
    r"""Local SGD: the mean of all replicas' weights, at the end of each round.

    Each of P replicas makes H steps of the model's optimizer, alone. Then each replica takes the
    mean :math:`w_r \leftarrow \frac{1}{P} \sum_s w_s`. Replicas send weights as fp32.

    Args:
        every: H, the number of steps in a round; or a ``Period``, for rounds that get longer or
            shorter.
        average: ``("weights",)``, or ``("weights", "optimizer")`` to average the optimizer's state,
            such as momenta, too. Each slot of the optimizer sends as many bytes again. Without
            ``"optimizer"`` each replica keeps its own state.
        start: number of steps before the first round, in which gradients are summed as in
            ``EveryStep`` (post-local SGD).

    Example:
        >>> strategy = tfscale.ScaleStrategy(sync=tfscale.sync.LocalSGD(every=8, start=1000))

    Reference: Stich, "Local SGD Converges Fast and Communicates Little", 2019; Lin et al., "Don't
    Use Large Mini-Batches, Use Local SGD", 2020 (post-local).
    """

    every: int | Period = 8
    average: tuple[str, ...] = ("weights",)
    start: int = 0

    def __post_init__(self) -> None:
        checked_period(self.every)
        checked_count(self.start, "start", least=0)
        expected = '("weights",) or ("weights", "optimizer")'
        given = (self.average,) if isinstance(self.average, str) else self.average
        parts = arguments.items(given, "average", expected)
        if parts not in (_PARTS[:1], _PARTS):
            raise arguments.wrong(self.average, "average", expected)
        object.__setattr__(self, "average", parts)

    def end(self, round: Round) -> None:
        """Replace weights, and the optimizer's state if it is averaged, with their means."""
        values = [weight.read_value() for weight in round.weights]
        assign(round, round.mean(values))
        if "optimizer" in self.average:
            round.average_optimizer()
