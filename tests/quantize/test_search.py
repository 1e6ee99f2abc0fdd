"""The search among few hundreds of nets: near the best one, for a tenth of the time."""

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


class Clock:
    """A clock that trainings advance: a third of a full one is spent before the first step."""

    now = 0.0

    def __call__(self):
        return Clock.now


def seconds_of(net, effort):
    return (0.3 + 0.7 * effort) * (1 + 0.02 * net["body"] + 0.2 * net["blocks"])


def timed(net, effort):
    Clock.now += seconds_of(net, effort)
    return accuracy(net, effort)


@pytest.mark.parametrize("seed", range(5))
def test_is_near_the_best_net_for_a_tenth_of_the_time(seed):
    best = max(accuracy(net, 1.0) for net in nets() if seconds(net) <= 9)
    found = quantize.search(SPACE, timed, latency=9, seed=seed, clock=Clock())
    every = sum(seconds_of(net, 1.0) for net in nets())
    assert found.space == 256 and found.whole == pytest.approx(every, rel=0.1)
    assert found.seconds <= 0.1 * found.whole and found.seconds <= 0.102 * every
    assert len(found.nets) == 8 and found.best.latency <= 9
    assert found.best.score == accuracy(found.best.choices, 1.0)
    assert found.best.score >= best - 0.5
    assert [net.score for net in found.nets] == sorted(net.score for net in found.nets)[::-1]


def test_time_decides_how_many_nets_are_trained():
    small, large = (
        quantize.search(SPACE, timed, latency=9, share=share, clock=Clock())
        for share in (0.05, 0.1)
    )
    assert len(small.probes) < len(large.probes)
    for found in (small, large):
        assert found.seconds == pytest.approx(
            sum(seconds_of(net.choices, net.effort) for net in (*found.nets, *found.probes))
        )
    space = {block: dict(list(SPACE[block].items())[:2]) for block in ("stem", "kernel", "body")}

    def slow(net, effort):  # all of the time is spent before the first step
        Clock.now += 1.0
        return net["stem"] + net["kernel"] + net["body"]

    options = {"latency": 9, "effort": 0.1, "share": 0.2, "clock": Clock()}
    with pytest.warns(RuntimeWarning, match="took 62.5% of the time of all 8 nets, and share=0.2"):
        assert len(quantize.search(space, slow, **options).nets) == 1


@pytest.mark.slow
def test_processes_find_the_same():
    one, two = (quantize.search(SPACE, timed, latency=9, workers=n, clock=Clock()) for n in (1, 2))
    assert [net.choices for net in one.probes] == [net.choices for net in two.probes]
    assert [net.choices for net in one.nets] == [net.choices for net in two.nets]
    assert "8 of 256 nets trained fully" in str(one) and "kernel" in str(one)


def test_choices_that_are_trained_shortly_are_balanced():
    found = quantize.search(SPACE, timed, latency=20, clock=Clock())
    for block, choices in SPACE.items():
        often = [sum(net.choices[block] == one for net in found.probes) for one in choices]
        assert max(often) - min(often) <= 0.4 * len(found.probes)


def test_only_nets_within_the_limit_are_trained():
    limit = 6.65
    found = quantize.search(SPACE, timed, latency=limit, clock=Clock())
    assert all(seconds(net.choices) <= limit for net in (*found.nets, *found.probes))
    fastest = sum(min(choices.values()) for choices in SPACE.values())
    (only,) = quantize.search(SPACE, timed, latency=fastest, clock=Clock()).nets
    assert only.latency == fastest


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
        (
            {"a": {1: 1.0, 2: 2.0}},
            {},
            "take at least that of 1.5: raise share to 0.75, or lower effort",
        ),
        (SPACE, {"share": 0.01, "latency": 9.0}, "raise share to 0.01"),
        ({"a": {1: 1.0, 2: "fast"}}, {}, r"space\['a'\]\[2\]"),
        ({}, {}, "space"),
    ],
)
def test_what_cannot_be_searched_is_refused(space, options, error):
    options = {"latency": 9.0, **({"share": 1} if options else {}), **options}
    with pytest.raises((ValueError, TypeError), match=error):
        quantize.search(space, accuracy, **options)


def test_a_score_that_is_not_finite_names_its_net():
    with pytest.raises((ValueError, TypeError), match="the score of {'stem': "):
        quantize.search(SPACE, lambda net, effort: float("nan"), latency=9)
