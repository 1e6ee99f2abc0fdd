"""Groups of replicas, which train as one larger replica each, and agree by another rule."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from tfscale.support import arguments
from tfscale.sync.diloco import DiLoCo
from tfscale.sync.every_step import EveryStep
from tfscale.sync.gossip import Gossip
from tfscale.sync.period import checked_count
from tfscale.sync.rule import Rule

MIXES_REPLICAS = (
    "{} mixes single replicas, but all replicas of a group must keep the same weights. Between "
    "groups, use a rule that computes means, such as tfscale.sync.LocalSGD(8)"
)


@dataclasses.dataclass(frozen=True, repr=False)
class Hierarchical(Rule):
    r"""Two rules: synchronous steps within groups, such as hosts, and rounds between groups.

    The replicas of a group make each step together, as one larger replica. They sum their
    gradients, and the statistics of their batches, over the group. So the group's step equals the
    step of one device with the group's part of the batch. Between groups ``outer`` acts as it does
    between replicas: its P is the number of groups.

    Args:
        inner: rule within groups; only ``EveryStep()`` is possible. The strategy's ``wire`` or
            ``method`` says how a group sends its gradients.
        outer: rule between groups, by default ``DiLoCo(every=50)``; or a rule of your own. Its own
            ``wire`` or ``method`` says how groups send the rule's values.
        group: number of consecutive replicas in a group; by default the number of devices of a
            worker or, if each worker has one device, the number of workers on a host.

    Example:
        >>> strategy = tfscale.ScaleStrategy(
        ...     sync=tfscale.sync.Hierarchical(outer=tfscale.sync.DiLoCo(every=50))
        ... )

    Reference: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2020, section 5
    (hierarchical local SGD).
    """

    inner: Rule = dataclasses.field(default_factory=EveryStep)
    outer: Rule = dataclasses.field(default_factory=lambda: DiLoCo(every=50))
    group: int | None = None

    sums_gradients = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, EveryStep):
            expected = "tfscale.sync.EveryStep(): the replicas of a group make each step together"
            advice = "Pass a rule that synchronizes less often as outer"
            raise arguments.wrong(self.inner, "inner", expected, advice)
        if not isinstance(self.outer, Rule) or isinstance(self.outer, (EveryStep, Hierarchical)):
            expected = (
                "a rule that says when groups agree, and on what, such as "
                "tfscale.sync.DiLoCo(every=50)"
            )
            raise arguments.wrong(self.outer, "outer", expected)
        if isinstance(self.outer, Gossip):
            raise ValueError(MIXES_REPLICAS.format(f"outer={self.outer!r}"))
        if self.outer.start:
            raise ValueError(
                f"outer={self.outer!r} begins with steps that are synchronous over all replicas, "
                "but with Hierarchical each group sums its own gradients from the first step. "
                "Leave out start"
            )
        if self.outer.bound:
            raise ValueError(
                f"outer={self.outer!r} sums gradients behind steps over all replicas, and groups "
                "sum theirs within steps. Use the rule without Hierarchical: "
                f"sync={self.outer!r}"
            )
        if self.group is not None:
            checked_count(self.group, "group", what="a number of replicas")

    def __repr__(self) -> str:
        """Return the settings that differ from their defaults."""
        group = "" if self.group is None else f", group={self.group}"
        return f"Hierarchical(outer={self.outer!r}{group})"

    def describe(self) -> str:
        """Return all settings: workers whose descriptions differ do not train together."""
        return f"groups of {self.group}, {type(self.outer).__name__}: {self.outer.describe()}"

    @property
    def round_rule(self) -> Rule:
        """Rule between groups."""
        return self.outer

    def team_size(self, devices: int, hosts: Sequence[str]) -> int:
        """Return how many replicas each group has.

        Raises:
            ValueError: groups would differ in size, or a group would be neither a part of one
                worker nor some whole workers.
        """
        if self.group is None:
            return devices if devices > 1 else self._workers_of_a_host(hosts)
        replicas, divides = devices * len(hosts), 0 in (devices % self.group, self.group % devices)
        if replicas % self.group or not divides:
            raise ValueError(
                f"sync={self!r} asks for groups of {self.group} replicas, and there are "
                f"{replicas}: {devices} on each of {len(hosts)} workers. Choose a group that "
                f"divides {replicas}, and that is a divisor or a multiple of {devices}"
            )
        return self.group

    def _workers_of_a_host(self, hosts: Sequence[str]) -> int:
        runs = [(host, len(list(run))) for host, run in itertools.groupby(hosts)]
        sizes = {size for _, size in runs}
        if len(sizes) > 1 or len(runs) > len(set(hosts)):
            said = ", ".join(f"{size} on {host}" for host, size in runs)
            raise ValueError(
                f"sync={self!r} makes a group of the workers of each host, so all hosts must have "
                "equal numbers of workers, listed one after the other; the workers are "
                f"{said}. Pass the number of replicas in a group, such as group=2"
            )
        return sizes.pop()
