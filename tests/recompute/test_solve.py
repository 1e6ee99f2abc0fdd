"""The solver against all choices there are, on random chains."""

import itertools

import numpy as np
import pytest

from tfscale.training.recompute.solve import Chain, solve


def random_chain(count, seed):
    rng = np.random.default_rng(seed)

    def numbers(*shape, most=20):
        return rng.integers(0, most, shape).astype(float)

    leaving, entering = numbers(count + 1, count + 1, most=6), numbers(count + 1, count + 1, most=3)
    return Chain(
        saved=numbers(count),
        forward=numbers(count, most=8),
        backward=numbers(count, most=8),
        cost=numbers(count) + 1,
        last_cost=numbers(count, most=4),
        gradient=numbers(count + 1, most=5),
        leaving=leaving,
        entering=entering,
    )


def all_choices(count):
    """Every way to cut n units into pieces, each of which is computed again or kept."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        borders = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        pieces = [range(a, b) for a, b in itertools.pairwise(borders)]
        for chosen in itertools.product([False, True], repeat=len(pieces)):
            kept = [piece for piece, again in zip(pieces, chosen) if not again]
            if all(len(piece) == 1 for piece in kept):
                yield pieces, chosen


def need_and_cost(chain, pieces, chosen):
    """Straight from the definition of the model."""
    memory = peak = cost = 0.0
    for piece, again in zip(pieces, chosen):
        a, b = piece.start, piece.stop
        if not again:
            peak = max(peak, memory + chain.saved[a] + chain.backward[a], memory + chain.forward[a])
            memory += chain.saved[a]
            continue
        memory += chain.entering[a, b]
        for i in piece:
            before, upto = chain.saved[a:i].sum(), chain.saved[a : i + 1].sum()
            forward = before + chain.forward[i] + chain.gradient[b]
            peak = max(peak, memory + upto + chain.backward[i], memory + forward)
        memory += chain.leaving[a, b]
        cost += chain.cost[a : b - 1].sum() + chain.last_cost[b - 1]
    return peak, cost


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_cheaper(seed):
    chain = random_chain(6, seed)
    choices = [need_and_cost(chain, *choice) for choice in all_choices(6)]
    peaks = sorted({peak for peak, _ in choices})
    for budget in [peaks[0] - 1, *peaks[:: max(1, len(peaks) // 8)]]:
        cheapest = min((cost for peak, cost in choices if peak <= budget), default=None)
        found = solve(chain, budget)
        assert (found and found.cost) == cheapest
        assert found is None or found.exact


def test_the_segments_are_what_they_cost():
    chain = random_chain(7, 99)
    peaks = sorted({need_and_cost(chain, *choice)[0] for choice in all_choices(7)})
    budget = peaks[len(peaks) // 4]
    found = solve(chain, budget)
    covered = {unit for segment in found.segments for unit in segment}
    kept = [range(i, i + 1) for i in range(7) if i not in covered]
    pieces = sorted([*found.segments, *kept], key=lambda piece: piece.start)
    peak, cost = need_and_cost(chain, pieces, [piece not in kept for piece in pieces])
    assert peak <= budget
    assert cost == found.cost


def test_long_chains_are_quick_and_exact():
    ones = np.ones(300)
    nothing = np.zeros((301, 301))
    leaving = nothing + 1 * (np.arange(301)[None, :] > np.arange(301)[:, None])
    chain = Chain(4 * ones, ones, ones, ones, 0.5 * ones, np.ones(301), leaving, nothing)
    found = solve(chain, 120)
    assert found is not None
    assert found.exact
