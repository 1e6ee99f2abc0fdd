"""Gossip: replicas train alone, and then each mixes its weights with those of a few others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from tfscale.collectives import Schedule, is_doubly_stochastic, mixtures as mixtures_of
from tfscale.collectives.gossip import Topology, checked_topology
from tfscale.collectives.wires import LOSSLESS, checked
from tfscale.support import arguments
from tfscale.sync.period import Period, checked_period
from tfscale.sync.rule import Round, Rule, assign


@dataclasses.dataclass(frozen=True, repr=False)
class Gossip(Rule):
    r"""Gossip: a mean over a few neighbours, instead of a mean over all replicas.

    Each of P replicas makes H steps of the model's optimizer, alone. Then it mixes weights:

    .. math:: w_r \leftarrow \sum_s M_{rs} w_s,

    where row r of the matrix M is zero except for replica r itself and the few replicas that send
    to it. The topology chooses these replicas for each round. Columns and rows of M sum to 1. So
    the mean over all replicas stays the same, and each round reduces the differences from the mean
    by the factor that ``tfscale.collectives.contraction`` computes. At the end of ``fit`` all
    replicas take the mean.

    Let Q be rounding to the wire, :math:`d_r` the number of replicas to which r sends, and
    :math:`z_r = w_r / (d_r + 1)`. Then replica r computes

    .. math:: w_r \leftarrow z_r + \sum_{s \to r} Q(z_s) + d_r (z_r - Q(z_r)).

    The sender keeps the rounding error of what it sends, so the mean stays the same.

    Args:
        every: H, the number of steps in a round; or a ``Period``.
        topology: ``"exponential"``: each replica sends one message a round, to the replica that is
            1, 2, 4, ... after it, in turn; ``"ring"``: each replica sends to both neighbours;
            ``"random"``: pairs that are drawn anew for each round; or a function from the number of
            replicas to a list of rounds, each a list of pairs (sender, receiver), in which each
            replica sends to as many replicas as send to it.
        seed: seed of the pairs that ``"random"`` draws.
        wire: format in which weights are sent, such as ``"bf16"``. Replicas come no closer to each
            other than two neighbouring numbers of this format.

    Example:
        >>> strategy = tfscale.ScaleStrategy(sync=tfscale.sync.Gossip(every=1, topology="ring"))

    Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", 2017.
    """

    every: int | Period = 1
    topology: str | Topology = "exponential"
    seed: int = 0
    wire: str = LOSSLESS

    agrees = False

    def __post_init__(self) -> None:
        checked_period(self.every)
        checked_topology(self.topology)
        arguments.whole(self.seed, "seed")
        checked(self.wire)

    def __repr__(self) -> str:
        """Return all settings, with the name of a topology function.

        Workers compare this text, and a function's own text has an address in memory, which
        differs between workers.
        """
        return (
            f"Gossip(every={self.every!r}, topology={_named(self.topology)}, seed={self.seed!r}, "
            f"wire={self.wire!r})"
        )

    def mixtures(self, replicas: int) -> list[Schedule]:
        """Return the mixtures that take turns between this number of replicas."""
        made = vars(self).setdefault("_made", {})
        if replicas not in made:
            made[replicas] = mixtures_of(self.topology, replicas, self.seed)
        return list(made[replicas])

    def check(self, replicas: int) -> None:
        """Raise if the topology never brings some replicas together, or changes their mean."""
        refuse_if_mean_changes(self, self.mixtures(replicas))

    def end(self, round: Round) -> None:
        """Replace the weights with this round's mixture."""
        values = [weight.read_value() for weight in round.weights]
        assign(round, round.mix(values, self.mixtures(round.replicas), self.wire))

    def settle(self, round: Round) -> None:
        """Replace the weights with their mean over all replicas."""
        assign(round, round.mean([weight.read_value() for weight in round.weights]))


def refuse_if_mean_changes(rule: Rule, mixtures: Sequence[Schedule]) -> None:
    """Raise if a mixture of a rule is not doubly stochastic."""
    for number, mixture in enumerate(mixtures):
        if not is_doubly_stochastic(mixture):
            raise ValueError(
                f"sync={rule!r} would change the mean of all weights: in round {number} of "
                f"{mixture.ranks} replicas, the shares that a replica receives do not sum to 1. "
                "Return rounds in which each replica sends to as many replicas as it receives from"
            )


def _named(topology: Any) -> str:
    if isinstance(topology, str):
        return repr(topology)
    if isinstance(topology, functools.partial):
        given = [*map(repr, topology.args), *(f"{k}={v!r}" for k, v in topology.keywords.items())]
        return f"partial({', '.join([_named(topology.func), *given])})"
    return str(getattr(topology, "__qualname__", type(topology).__qualname__))
