"""The search among few hundreds of nets: near the best one, for a tenth of the trainings."""

import itertools

import numpy as np
import pytest

from tfscale import quantize
from tfscale.analysis.quantize.program import Program, Resource

SPACE = {
    "stem": {8: 1.0, 16: 2.0},
    "kernel": {3: 1.0, 5: 2.2},
    "body": {16: 1.5, 24: 2.0, 32: 3.0, 48: 4.5},
    "blocks": {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0},
    "bits": {4: 0.5, 8: 1.0},
    "head": {16: 0.2, 32: 0.4},
}  # 256 nets


def accuracy(net, effort):
    """More is better, with less from each further one; blocks help each other; trainings vary."""
    size = np.log2([net["stem"], net["kernel"], net["body"], net["head"]]) @ [0.5, 0.8, 1.0, 0.2]
    together = 0.15 * np.log2(net["body"]) * np.sqrt(net["blocks"])
    exact = 80 + size + together + 0.3 * (net["bits"] == 8) - 0.02 * size**2
    dice = np.random.default_rng([*(int(choice) for choice in net.values()), int(100 * effort)])
    return exact - 6 * (1 - effort) + dice.normal(0, 0.1)


def nets():
    return [dict(zip(SPACE, each)) for each in itertools.product(*SPACE.values())]


def seconds(net):
    return sum(SPACE[block][choice] for block, choice in net.items())


@pytest.mark.parametrize("seed", range(5))
def test_is_near_the_best_net_for_a_tenth_of_the_trainings(seed):
    best = max(accuracy(net, 1.0) for net in nets() if seconds(net) <= 9)
    found = quantize.search(SPACE, accuracy, latency=9, seed=seed)
    assert found.space == 256 and found.trainings <= 25.6
    assert found.best.latency <= 9
    assert found.best.score == accuracy(found.best.choices, 1.0)
    assert found.best.score >= best - 0.5
    assert [net.score for net in found.nets] == sorted(net.score for net in found.nets)[::-1]


def test_processes_find_the_same():
    one, two = (quantize.search(SPACE, accuracy, latency=9, workers=n) for n in (1, 2))
    assert one == two
    assert "4 of 256 nets trained fully" in str(one) and "kernel" in str(one)


def test_choices_that_are_trained_shortly_are_balanced():
    found = quantize.search(SPACE, accuracy, latency=9)
    for block, choices in SPACE.items():
        often = [sum(net.choices[block] == one for net in found.probes) for one in choices]
        assert max(often) - min(often) <= 0.4 * len(found.probes)


def test_solutions_are_the_cheapest_choices_in_order():
    dice = np.random.default_rng(0)
    costs = [{b: float(dice.random()) for b in (2, 4, 8)} for _ in range(4)]
    uses = [{b: b * float(dice.random()) for b in (2, 4, 8)} for _ in range(4)]
    limit = Resource("size", uses, 8.0)
    found = Program(costs, [limit]).solutions(10)
    every = [each for each in itertools.product((2, 4, 8), repeat=4) if limit.has_room(each)]
    every.sort(key=lambda each: sum(cost[b] for cost, b in zip(costs, each, strict=True)))
    assert [one.bits for one in found] == every[:10]
    assert len(Program(costs[:1], []).solutions(10)) == 3


@pytest.mark.parametrize(
    "space, options, error",
    [
        ({"a": dict.fromkeys(range(600), 1.0)}, {}, "takes at most 512: .*KerasTuner or AutoKeras"),
        ({"a": {1: 1.0, 2: 2.0}}, {"latency": 0.5}, "smallest possible is 1 s"),
        ({"a": {1: 1.0, 2: 2.0}}, {}, "take 4.5: lower finalists or effort"),
        (SPACE, {"share": 0.01, "latency": 9.0}, "raise share to 0.015"),
        ({"a": {1: 1.0, 2: "fast"}}, {}, r"space\['a'\]\[2\]"),
        ({}, {}, "space"),
    ],
)
def test_what_cannot_be_searched_is_refused(space, options, error):
    options = {"latency": 9.0, **({"share": 1, "finalists": 1} if options else {}), **options}
    with pytest.raises((ValueError, TypeError), match=error):
        quantize.search(space, accuracy, **options)


def test_a_score_that_is_not_finite_names_its_net():
    with pytest.raises((ValueError, TypeError), match="the score of {'stem': "):
        quantize.search(SPACE, lambda net, effort: float("nan"), latency=9)
