"""Collective algorithms as data: build, verify, price and draw them.

Example:
    >>> from tfscale.collectives import Link, halving, simulate
    >>> schedule = halving(6)
    >>> schedule.verify().rounds
    6
    >>> link = Link(alpha=5e-6, beta=1e-10)
    >>> simulate(schedule, 4e6, link).seconds < 2 * schedule.cost.time(4e6, link)
    True
"""

from __future__ import annotations

from tfscale.collectives.broadcast import broadcast
from tfscale.collectives.central import central
from tfscale.collectives.cost import Cluster, Cost, Link
from tfscale.collectives.direct import direct
from tfscale.collectives.gossip import (
    TOPOLOGIES,
    contraction,
    is_doubly_stochastic,
    matrix,
    mixture,
    mixtures,
    share,
)
from tfscale.collectives.halves import all_gather, reduce_scatter
from tfscale.collectives.halving import halving
from tfscale.collectives.hierarchical import hierarchical
from tfscale.collectives.moves import Kind, Move, ScheduleError, add, finalise, keep, send
from tfscale.collectives.registry import ALGORITHMS, resolve
from tfscale.collectives.ring import ring
from tfscale.collectives.route import all_to_all, transfer
from tfscale.collectives.schedule import Schedule
from tfscale.collectives.simulate import Simulation, simulate
from tfscale.collectives.tree import tree
from tfscale.collectives.verify import Count

__all__ = [
    "ALGORITHMS",
    "TOPOLOGIES",
    "Cluster",
    "Cost",
    "Count",
    "Kind",
    "Link",
    "Move",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "add",
    "all_gather",
    "all_to_all",
    "broadcast",
    "central",
    "contraction",
    "direct",
    "finalise",
    "halving",
    "hierarchical",
    "is_doubly_stochastic",
    "keep",
    "matrix",
    "mixture",
    "mixtures",
    "reduce_scatter",
    "resolve",
    "ring",
    "send",
    "share",
    "simulate",
    "transfer",
    "tree",
]
