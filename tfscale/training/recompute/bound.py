"""A cost that no order within a budget can be below."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tfscale.training.recompute.graph import Graph

Numbers = npt.NDArray[Any]


def lower_bound(graph: Graph, budget: float) -> float:
    """Return a bound of the cost of recomputation; infinity if no order fits.

    When a node is first computed, the memory beside its working set holds some of the results that
    later nodes need. All others are computed again. The cheapest choice at that moment is a
    knapsack problem, and its relaxation is solved by sorting.
    """
    size = np.array([node.size for node in graph.nodes])
    cost = np.array([node.cost for node in graph.nodes])
    once = np.array([node.once for node in graph.nodes], bool)
    last_user = _last_users(graph, len(graph.nodes))
    last_before_again = _last_users(graph, graph.first_again)
    best = 0.0
    for now in range(len(graph.nodes)):
        waiting = np.flatnonzero(last_user[:now] > now)
        waiting = waiting[~np.isin(waiting, graph.nodes[now].needs)]
        stays = once[waiting] | (last_before_again[waiting] > now)
        room = budget - graph.working_set(now) - size[waiting[stays]].sum()
        if room < 0:
            return float("inf")
        best = max(best, _cheapest_lost(size[waiting[~stays]], cost[waiting[~stays]], room))
    return best


def _last_users(graph: Graph, before: int) -> Numbers:
    """Return the last user of each node among the nodes before a number; -1 if it has none."""
    each = ([user for user in users if user < before] for users in graph.users)
    return np.array([max(users, default=-1) for users in each])


def _cheapest_lost(size: Numbers, cost: Numbers, room: float) -> float:
    """Return the least cost of results that do not fit, if results could be divided."""
    order = np.argsort(-cost / np.maximum(size, 1e-9))
    before = np.cumsum(size[order]) - size[order]
    inside = np.clip((room - before) / np.maximum(size[order], 1e-9), 0, 1)
    return float((cost[order] * (1 - inside)).sum())
