"""The simulation and the closed forms describe the same machine."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from tests.collectives.common import all_reduces, calls, schedules
from tfscale.collectives import (
    ALGORITHMS,
    Cluster,
    Link,
    Schedule,
    ScheduleError,
    all_gather,
    broadcast,
    central,
    direct,
    finalise,
    halving,
    hierarchical,
    reduce_scatter,
    ring,
    send,
    simulate,
    tree,
)

LINK = Link(Fraction(3), Fraction(1, 7))  # fractions: no rounding, so equal means equal
NBYTES = Fraction(1000)
GAMMAS = [Fraction(0), Fraction(1, 50), Fraction(1, 2)]
EXACT = [ring, direct, central]


def simulated_and_stated(schedule: Schedule, machine=LINK, gamma=Fraction(0)):
    assert schedule.cost is not None
    stated = schedule.cost.time(NBYTES, machine, gamma)
    return simulate(schedule, NBYTES, machine, gamma=gamma).seconds, stated


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("ranks", [*range(1, 34), 64, 100])
@pytest.mark.parametrize("algorithm", EXACT)
def test_exact_forms(algorithm, ranks: int, gamma) -> None:
    simulated, stated = simulated_and_stated(algorithm(ranks), gamma=gamma)
    assert simulated == stated


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32, 64])
def test_halving_is_exact_for_powers_of_two(ranks: int, gamma) -> None:
    simulated, stated = simulated_and_stated(halving(ranks), gamma=gamma)
    assert simulated == stated


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("ranks", [*range(3, 34), 65, 100, 200])
def test_halving_else_is_an_estimate(ranks: int, gamma) -> None:
    """Ranks that need not wait for an extra rank run ahead; their messages queue before others."""
    for nbytes, tolerance in ((Fraction(1000), Fraction(1, 7)), (Fraction(1), Fraction(1, 3))):
        stated = halving(ranks).cost.time(nbytes, LINK, gamma)
        simulated = simulate(halving(ranks), nbytes, LINK, gamma=gamma).seconds
        assert stated <= simulated <= stated * (1 + tolerance)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("ranks", [*range(1, 34), 64, 100, 511, 1000])
def test_tree_is_exact_but_for_one_message(ranks: int, gamma) -> None:
    """A message of one tree may have to wait at one rank for a message of the other tree."""
    simulated, stated = simulated_and_stated(tree(ranks), gamma=gamma)
    assert stated <= simulated <= stated + LINK.seconds(NBYTES / 2)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 21, 32, 300])
def test_broadcast_is_exact(ranks: int, gamma) -> None:
    simulated, stated = simulated_and_stated(broadcast(ranks, ranks // 2), gamma=gamma)
    assert simulated == stated


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("half", [reduce_scatter, all_gather])
@pytest.mark.parametrize("whole", [ring, direct, halving])
def test_halves_are_exact(whole, half, gamma) -> None:
    for ranks in (1, 2, 8, 16):
        simulated, stated = simulated_and_stated(half(whole(ranks)), gamma=gamma)
        assert simulated == stated


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("outer", [*EXACT, halving])
@pytest.mark.parametrize("sizes", [[1], [5], [4, 4], [3] * 4, [2] * 8])
def test_hierarchies_of_equal_groups_are_exact(sizes, outer, gamma) -> None:
    cluster = Cluster(sizes, LINK, Link(Fraction(10), Fraction(2)))
    simulated, stated = simulated_and_stated(hierarchical(sizes, outer), cluster, gamma)
    assert simulated == stated


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.sampled_from(GAMMAS))
@settings(max_examples=60)
def test_a_ring_between_uneven_groups_is_bounded(sizes, gamma) -> None:
    cluster = Cluster(sizes, LINK, Link(Fraction(10), Fraction(2)))
    simulated, stated = simulated_and_stated(hierarchical(sizes), cluster, gamma)
    assert stated * Fraction(9, 10) <= simulated <= stated


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=6),
    st.sampled_from([direct, central, tree, halving]),
    st.sampled_from(GAMMAS),
)
@settings(max_examples=60)
def test_uneven_groups_are_estimated(sizes, outer, gamma) -> None:
    cluster = Cluster(sizes, LINK, Link(Fraction(10), Fraction(2)))
    simulated, stated = simulated_and_stated(hierarchical(sizes, outer), cluster, gamma)
    assert stated / 2 < simulated < stated * Fraction(4, 3)


def test_a_ring_on_a_cluster_is_bounded() -> None:
    cluster = Cluster([4] * 4, LINK, Link(Fraction(10), Fraction(2)))
    simulated, stated = simulated_and_stated(ring(16), cluster)
    assert stated * Fraction(9, 10) < simulated <= stated


@pytest.mark.parametrize("algorithm", [direct, tree, halving])
def test_other_flat_algorithms_on_a_cluster_are_estimated(algorithm) -> None:
    cluster = Cluster([4] * 4, LINK, Link(Fraction(10), Fraction(2)))
    simulated, stated = simulated_and_stated(algorithm(16), cluster)
    assert stated / 3 < simulated < stated * Fraction(3, 2)


@given(schedules(), st.integers(1, 3))
@settings(max_examples=100)
def test_simulated_bytes_are_the_verified_ones(schedule: Schedule, parts: int) -> None:
    count = schedule.verify()
    result = simulate(schedule, NBYTES, LINK, parts=parts)
    assert max(result.sent) == count.sent * NBYTES
    assert max(result.received) == count.received * NBYTES
    assert sum(result.sent) == sum(result.received)


@given(st.sampled_from([ring, direct]), st.integers(1, 16), st.integers(1, 3), st.booleans())
@settings(max_examples=60)
def test_one_rank_stands_for_all(algorithm, ranks: int, parts: int, grouped: bool) -> None:
    short = algorithm(ranks)
    machine = Cluster([2] * (ranks // 2), LINK, Link(5, 1)) if grouped and ranks % 2 == 0 else LINK
    gamma = Fraction(1, 9)
    quick = simulate(short, NBYTES, machine, gamma=gamma, parts=parts)
    # All ranks are simulated when messages are recorded.
    long = simulate(short, NBYTES, machine, gamma=gamma, parts=parts, messages=True)
    unrecorded = {"messages": quick.messages, "finalised": quick.finalised}
    assert quick == dataclasses.replace(long, **unrecorded)
    unsaid = dataclasses.replace(short, symmetric=False)
    assert quick == simulate(unsaid, NBYTES, machine, gamma=gamma, parts=parts)


@given(all_reduces(most=12))
@settings(max_examples=50)
def test_recorded_messages_are_all_there(schedule: Schedule) -> None:
    result = simulate(schedule, NBYTES, LINK, messages=True)
    assert len(result.messages) == schedule.verify().messages
    for message in result.messages:
        busy = LINK.seconds((message.last - message.first) * NBYTES / schedule.chunks)
        assert message.arrived >= message.left + busy
    owned = sum(final.last - final.first for final in result.finalised)
    assert owned == schedule.chunks
    assert result.seconds == simulate(schedule, NBYTES, LINK).seconds


def test_parts_are_a_pipeline() -> None:
    """A tree in one part pays for its depth; in many parts it tends to two buffers."""
    link = Link(0.0, 1.0)
    times = [simulate(tree(32), 1.0, link, parts=parts).seconds for parts in (1, 4, 16, 64)]
    assert times == sorted(times, reverse=True)
    assert times[0] == 9
    assert times[-1] < 2.6


def test_a_thousand_ranks_take_seconds() -> None:
    """Rings and direct exchanges have two million messages, and are not gone through."""
    link, gamma = Link(5e-6, 1e-10), 1e-11
    for name in ("ring", "direct", "tree", "halving", "central"):
        schedule = ALGORITHMS[name](1000)
        seconds = simulate(schedule, 1e8, link, gamma=gamma).seconds
        assert schedule.cost is not None
        assert seconds == pytest.approx(schedule.cost.time(1e8, link, gamma), rel=0.05)
        assert calls(lambda s=schedule: simulate(s, 1e8, link, gamma=gamma)) < 2_000_000


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_hundred_thousand_ranks_at_once(name: str) -> None:
    cost = ALGORITHMS[name](100_000).cost
    assert cost is not None
    assert cost.time(4e8, Link(5e-6, 1e-10), 1e-11) > 0
    assert calls(lambda: cost.time(4e8, Link(5e-6, 1e-10), 1e-11)) < 1000


def test_what_the_textbooks_say_holds() -> None:
    """Few bytes: few rounds win. Many bytes: little volume wins."""
    link = Link(5e-6, 1e-10)

    def best(nbytes: float) -> str:
        costs = {name: ALGORITHMS[name](64).cost for name in ("ring", "tree", "halving", "central")}
        return min(costs, key=lambda name: costs[name].time(nbytes, link))

    assert best(1e9) in ("ring", "halving")
    assert best(1e3) == "halving"
    assert ring(64).cost.time(1e9, link) < central(64).cost.time(1e9, link) / 20


def test_the_slowest_link_counts_only_if_it_is_used() -> None:
    fast, slow = Link(1, 1), Link(100, 100)
    assert ring(4).cost.time(8, Cluster([4], fast, slow)) == ring(4).cost.time(8, fast)
    assert ring(4).cost.time(8, Cluster([1] * 4, slow, fast)) == ring(4).cost.time(8, fast)


def test_refusals_say_what_to_do() -> None:
    cluster = Cluster([2, 2], LINK, LINK)
    with pytest.raises(ValueError, match="groups of 3x2 ranks cannot be priced.*are 2x2"):
        hierarchical([2, 2, 2]).cost.time(1, cluster)
    with pytest.raises(ValueError, match="ring has 5 ranks, the cluster 4"):
        simulate(ring(5), 1, cluster)
    with pytest.raises(ValueError, match="parts is a number of parts, .*; got 0"):
        simulate(ring(5), 1, LINK, parts=0)
    with pytest.raises(ValueError, match="sizes.* is a .*number"):
        Cluster([2, 0], LINK, LINK)
    unheard = Schedule("mine", 2, 1, lambda rank: [finalise(0), send(1 - rank, 0)])
    with pytest.raises(ScheduleError, match="nobody receives"):
        simulate(unheard, 1, LINK)
