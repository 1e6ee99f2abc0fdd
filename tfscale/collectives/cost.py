"""The cost of schedules: a model of the machine, and closed forms.

The machine: every rank has a port on each level of the network, full duplex: it sends one message
at a time and, meanwhile, receives one. A message of n bytes keeps both ports busy for ``alpha +
beta * n`` seconds: the sender's port from the start of the message, the receiver's port from then
or as soon as it is free (the network holds the bytes until then). Ports serve first come, first
served. Adding n bytes takes ``gamma * n`` seconds; a rank does one addition at a time, while its
ports continue. All else is free. ``simulate.py`` runs this machine message by message; a ``Cost``
is its closed form.

Numbers may be floats, or ints and ``Fraction`` for exact results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from tfscale.support import arguments


@dataclasses.dataclass(frozen=True)
class Link:
    """A network in which all links are equal.

    Args:
        alpha: seconds per message.
        beta: seconds per byte.

    Example:
        >>> gigabit = Link(alpha=5e-5, beta=8e-9)
        >>> print(round(gigabit.seconds(1e6), 5))
        0.00805
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        arguments.real(self.alpha, "alpha", 0, what="a number of seconds per message")
        arguments.real(self.beta, "beta", 0, what="a number of seconds per byte")

    def seconds(self, nbytes: float) -> float:
        """Return the time for which one message keeps a port busy."""
        return self.alpha + self.beta * nbytes


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Groups of consecutive ranks: ``inner`` links within a group, ``outer`` links between groups.

    Every rank has its own outer port. If the ranks of a group share one network card, multiply the
    outer beta by the size of the group.

    Example:
        >>> two_hosts = Cluster([8, 8], inner=Link(2e-6, 1e-11), outer=Link(2e-5, 1e-10))
    """

    sizes: Sequence[int]
    inner: Link
    outer: Link

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", checked_sizes(self.sizes, "sizes"))
        for name in ("inner", "outer"):
            expected = "a Link, such as Link(alpha=5e-5, beta=8e-9)"
            arguments.instance(getattr(self, name), name, Link, expected)


Machine = Link | Cluster


def checked_sizes(sizes: Any, name: str) -> tuple[int, ...]:
    """Return the sizes of groups, each with at least one rank, or raise."""
    expected = "a list of the numbers of ranks in each group, such as [8, 8]"

    def size(value: Any, name: str) -> int:
        return arguments.whole(value, name, 1, what="a number of ranks")

    return arguments.items(sizes, name, expected, size)


def checked_machine(machine: Any, name: str) -> Machine:
    """Return a machine, or raise."""
    expected = "a Link or a Cluster, such as Link(alpha=5e-5, beta=8e-9)"
    if isinstance(machine, (Link, Cluster)):
        return machine
    raise arguments.wrong(machine, name, expected)


def slowest(machine: Machine) -> Link:
    """Return a link that is at least as slow as every link of the machine."""
    if isinstance(machine, Link):
        return machine
    used = [machine.inner] * (max(machine.sizes) > 1) + [machine.outer] * (len(machine.sizes) > 1)
    links = used or [machine.inner]
    return Link(max(link.alpha for link in links), max(link.beta for link in links))


@dataclasses.dataclass(frozen=True)
class Cost:
    """The closed form of a schedule's cost.

    Args:
        rounds: length of the longest chain of messages that depend on each other.
        sent: number of buffers that the busiest sender sends.
        received: number of buffers that the busiest receiver receives.
        seconds: a function of (nbytes, machine, gamma); read it through ``time``.
        exact: False if rounds, sent and received are upper bounds (see ``hierarchical``); the time
            is an estimate then.
    """

    rounds: int
    sent: Fraction
    received: Fraction
    seconds: Callable[[float, Machine, float], float]
    exact: bool = True

    def __post_init__(self) -> None:
        arguments.whole(self.rounds, "rounds", 0)
        arguments.real(self.sent, "sent", 0, what="a number of buffers")
        arguments.real(self.received, "received", 0, what="a number of buffers")
        arguments.function(self.seconds, "seconds", "a function of nbytes, machine and gamma")
        arguments.flag(self.exact, "exact")

    def time(self, nbytes: float, machine: Machine, gamma: float = 0) -> float:
        """Return the seconds to reduce ``nbytes``; adding takes ``gamma`` seconds per byte.

        Algorithms without groups are priced on a ``Cluster`` as if every link were the slowest one.
        docs/algorithms.md says how near each form comes to the simulation.

        Example:
            >>> from tfscale.collectives import ring
            >>> ring(100_000).cost.time(400e6, Link(alpha=5e-6, beta=1e-10))  # seconds
            1.0799...
        """
        return self.seconds(nbytes, machine, gamma)


def flat(
    seconds: Callable[[float, Link, float], float],
) -> Callable[[float, Machine, float], float]:
    """Extend a closed form for equal links to any machine, by the machine's slowest link."""
    return lambda nbytes, machine, gamma: seconds(nbytes, slowest(machine), gamma)


def fan_in(messages: int, message: float, addition: float) -> float:
    """Return the seconds to receive ``messages`` through one port and add each as it arrives."""
    if messages == 0:
        return 0
    return message + (messages - 1) * max(message, addition) + addition
