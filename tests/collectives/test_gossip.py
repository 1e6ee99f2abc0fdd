"""Mixtures: what the verifier refuses, what they cost, and how fast they bring ranks together."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from tfscale.collectives import (
    TOPOLOGIES,
    Link,
    Schedule,
    ScheduleError,
    add,
    contraction,
    finalise,
    is_doubly_stochastic,
    keep,
    matrix,
    mixtures,
    resolve,
    ring,
    send,
    simulate,
)

RANKS = [*range(1, 10), 16]
LINK = Link(Fraction(3), Fraction(1, 7))


def star(ranks):
    """The first sends to all others, and then they to it."""
    out = [(0, r) for r in range(1, ranks)]
    return [out, [(b, a) for a, b in out]]


def one_way(ranks):
    """A ring with a short cut, of which not all have as many receivers."""
    return [[(r, (r + 1) % ranks) for r in range(ranks)] + [(0, ranks // 2)]]


def made_of(*programs, chunks=1):
    return Schedule("mine", len(programs), chunks, lambda r: programs[r], goal="mixture")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_round_is_right_and_costs_what_it_says(topology, ranks):
    for schedule in mixtures(topology, ranks, seed=ranks):
        schedule.verify()  # the rounds and bytes of its closed form, too
        assert is_doubly_stochastic(schedule)
        for gamma in (Fraction(0), Fraction(1, 50)):
            found = simulate(schedule, Fraction(1000), LINK, gamma=gamma).seconds
            assert found == schedule.cost.time(Fraction(1000), LINK, gamma)


@pytest.mark.parametrize("graph", [star, one_way])
def test_columns_sum_to_one_in_any_graph(graph):
    rounds = mixtures(graph, 5)
    for schedule in rounds:
        assert [sum(column) for column in zip(*matrix(schedule))] == [1] * 5
        schedule.verify()
    assert not all(map(is_doubly_stochastic, rounds))


MIXED = [send(1, 0), add(1, 0), finalise(0)]
OTHER = [send(0, 0), add(0, 0), finalise(0)]


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([MIXED, OTHER[1:]], "expected rank 1 to send the partial sum .* wait forever"),
        ([MIXED, [OTHER[0], OTHER[2]]], "expected rank 1 to receive the partial sum"),
        ([MIXED[:2], OTHER], "rank 0: expected a move that gives away, finalises"),
        ([[MIXED[1], MIXED[0], MIXED[2]], OTHER], "it is 'mixed with what others gave'"),
        ([[MIXED[2], *MIXED[:2]], OTHER], r"move 1 \(send 0 to rank 1\).*but it is 'final'"),
        ([[send(1, 0), *MIXED], OTHER], "a message different from all others"),
        ([MIXED, [OTHER[0], keep(0, 0)]], "no such move in a schedule whose goal is mixture"),
    ],
)
def test_mistakes_are_named(programs, message):
    with pytest.raises(ScheduleError, match=message):
        made_of(*programs).verify()


def test_all_receivers_get_the_same_share():
    halves = [[send(1, range(2)), finalise(range(2))], [add(0, range(2)), finalise(range(2))]]
    with pytest.raises(ScheduleError, match="expected one chunk, .* got 2 chunks"):
        made_of(*halves, chunks=2).verify()


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (lambda p: [[(0, 1), (1, 0)]], "not connected over time: rank 0 reaches 2 of 4"),
        (lambda p: [[(0, r)] for r in range(1, p)], "rank 0 hears of 1 of 4 ranks"),
        (lambda p: [[(0, 4)]], r"two different ranks of 0..3, got \(0, 4\)"),
        (lambda p: [[(1, 1)]], r"got \(1, 1\)"),
        (lambda p: [[(0, 1.5)]], r"got \(0, 1.5\)"),
        (lambda p: [[7]], "got 7"),
        (lambda p: [[(0, 1), (0, 1)]], r"each pair once in a round, but \(0, 1\) occurs twice"),
        (lambda p: [], "made no rounds for 4 ranks"),
    ],
)
def test_a_topology_that_does_not_work_is_refused(topology, message):
    with pytest.raises(ScheduleError, match=message):
        mixtures(topology, 4)


def test_an_unknown_topology_and_a_wrong_goal():
    with pytest.raises(ValueError, match="topology is .* got 'rign'. Did you mean 'ring'"):
        mixtures("rign", 4)
    with pytest.raises(ValueError, match="a schedule of mixture; expected one of all_reduce"):
        resolve(mixtures("ring", 4)[0], 4)


def measured(rounds, periods):
    """The largest difference of a rank from the mean, each time when all rounds have had a turn.

    Push-sum: numbers and masses are mixed alike, by the very moves of the programs.
    """
    ranks = rounds[0].ranks
    random = np.random.default_rng(0)
    held = np.stack([np.ones(ranks), *random.standard_normal([8, ranks])])
    first, spreads = held.sum(1), []
    for schedule in rounds * periods:
        given = held / [
            len([m for m in schedule.program(r) if m.kind == 0]) + 1.0 for r in range(ranks)
        ]
        held = given.copy()
        for rank in range(ranks):
            for move in schedule.program(rank):
                if move.kind == 1:
                    held[:, rank] += given[:, move.peer]
        values = held[1:] / held[0]
        spreads.append(np.abs(values - first[1:, None] / ranks).max())
    np.testing.assert_allclose(held.sum(1), first, rtol=1e-12)  # nothing is lost
    return spreads[len(rounds) - 1 :: len(rounds)]


GRAPHS = [
    (name, p)
    for name, p in itertools.product(TOPOLOGIES, (3, 4, 5, 7, 8, 9))
    if (name, p) != ("ring", 3)
]


@pytest.mark.parametrize(("topology", "ranks"), [*GRAPHS, (star, 5), (one_way, 6), (one_way, 7)])
def test_ranks_come_together_at_the_rate_of_the_spectral_gap(topology, ranks):
    rounds = mixtures(topology, ranks, seed=1)
    stated = contraction(rounds)
    assert (stated == 0) == (topology == "exponential" and ranks in (4, 8)) or topology == "random"
    if stated == 0:
        assert measured(rounds, 2)[-1] < 1e-14  # the mean itself
        return
    halves = max(2, int(-9 / np.log(stated) / len(rounds)))  # to about 1e-8 in both
    spreads = measured(rounds, 2 * halves)
    found = (spreads[-1] / spreads[halves - 1]) ** (1 / (len(rounds) * halves))
    assert found == pytest.approx(stated, rel=0.05)


def test_the_ring_has_the_gap_of_the_books():
    for ranks in (4, 5, 9, 64):
        expected = 1 / 3 + 2 / 3 * np.cos(2 * np.pi / ranks)
        assert contraction(mixtures("ring", ranks)) == pytest.approx(expected, rel=1e-9)
    assert contraction(mixtures("ring", 3)) < 1e-9
    assert contraction(mixtures("ring", 1)) == 0


def test_the_seed_draws_pairs():
    def pairs(seed):
        return [m.program(0) for m in mixtures("random", 7, seed)]

    assert pairs(1) == pairs(1) != pairs(2)


def test_a_mixture_is_drawn():
    figure = mixtures("exponential", 5)[1].draw()
    assert "gossip(exponential, 2 of 3), 5 ranks" in figure.axes[0].get_title(loc="left")


def test_it_is_cheaper_than_an_all_reduce():
    link = Link(5e-5, 8e-9)
    for one in mixtures("exponential", 64):
        assert one.cost.time(4e6, link) < 0.55 * ring(64).cost.time(4e6, link)
