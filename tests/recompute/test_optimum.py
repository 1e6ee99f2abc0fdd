"""Optimal orders: the model, and each solver against a plain reference."""

import numpy as np
import pytest

from tests.recompute.reference import cheapest, random_graph
from tfscale.training.recompute.bound import lower_bound
from tfscale.training.recompute.graph import Graph, Node, check, memory, more_cost, peak
from tfscale.training.recompute.integer import solve_integer
from tfscale.training.recompute.optimum import optimum


def chain(depth, size=1.0):
    """Layers of equal size and cost, and their gradients."""
    nodes = [Node(1.0, size, (i - 1,) if i else ()) for i in range(depth)]
    for k in range(depth):
        layer = depth - 1 - k
        needs = {depth + k - 1, layer, max(0, layer - 1)}
        nodes.append(Node(2.0, size, tuple(sorted(needs)), once=True))
    return Graph(tuple(nodes), first_again=depth)


def budgets(graph):
    """Every budget at which the best order may change, from plain's peak down, and one below."""
    budget = peak(graph, graph.plain)
    while True:
        yield budget
        best = optimum(graph, budget, solver="exact")
        if best is None:
            return
        budget = peak(graph, best.order) - 1


def test_memory_is_what_a_person_counts():
    graph = Graph((Node(1, 3), Node(1, 5, (0,)), Node(1, 2, (1,), extra=1), Node(1, 1, (0, 2))), 10)
    assert memory(graph, graph.plain).tolist() == [13, 18, 21, 16]
    assert memory(graph, (0, 1, 2, 0, 3)).tolist() == [13, 18, 18, 15, 16]
    assert more_cost(graph, (0, 1, 2, 0, 3)) == 1


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ((0, 2, 1), "node 2 before node 1"),
        ((0, 1), "ends before node 2 of 3"),
        ((0, 1, 1, 2), "node 1 again, which is not allowed"),
        ((0, 0, 1, 2), "node 0 again, which is not allowed"),
        ((0, 1, 0, 2), "takes 3 bytes, more than the budget 2"),
    ],
)
def test_wrong_orders_are_refused(order, said):
    graph = Graph((Node(1, 1), Node(1, 1, (0,), once=True), Node(1, 1, (0, 1))), first_again=2)
    check(graph, (0, 1, 0, 2))
    with pytest.raises(ValueError, match=said):
        check(graph, order, budget=2)


def assert_optimal_at_every_budget(seed):
    graph = random_graph(seed)
    for budget in budgets(graph):
        best, least = optimum(graph, budget, solver="exact"), cheapest(graph, budget)
        assert (best and best.cost) == least, (seed, budget)
        assert lower_bound(graph, budget) <= (np.inf if least is None else least), (seed, budget)
        if best:
            check(graph, best.order, budget)
            assert best.gap == 0


def test_exact_orders_are_the_cheapest():
    for seed in range(150):
        assert_optimal_at_every_budget(seed)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_exact_orders_of_a_thousand_graphs_are_the_cheapest():
    for seed in range(1000):
        assert_optimal_at_every_budget(seed)


def assert_integer_is_exact(seed):
    graph = random_graph(seed, most=7)
    for budget in budgets(graph):
        least, solved = cheapest(graph, budget), solve_integer(graph, budget, seconds=60)
        if least is None:
            assert solved.order is None
            continue
        check(graph, solved.order, budget)
        assert more_cost(graph, solved.order) == least == pytest.approx(solved.bound), (
            seed,
            budget,
        )


def test_the_integer_program_is_exact():
    for seed in range(40):
        assert_integer_is_exact(seed)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_integer_program_of_a_thousand_graphs_is_exact():
    for seed in range(1000):
        assert_integer_is_exact(seed)


@pytest.mark.parametrize("solver", ["auto", "rounded", "search", "integer"])
def test_all_solvers_keep_the_budget_and_know_how_good_they_are(solver):
    graph = chain(8)
    least = cheapest(graph, 9)
    best = optimum(graph, 9, solver=solver, seconds=5)
    check(graph, best.order, 9)
    assert best.bound <= least <= best.cost
    assert best.cost * (1 - best.gap) <= least
    if solver in ("auto", "integer"):
        assert best.cost == least
        assert best.gap == pytest.approx(0)
