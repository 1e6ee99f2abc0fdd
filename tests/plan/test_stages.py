"""Stages with replicas: PipeDream's profiles, its published cuts, and brute force."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest

from tfscale.plan import stages
from tfscale.plan.profile import Chain, read_profile
from tfscale.plan.stages import Stage

PROFILES = Path(__file__).parent / "pipedream"
GIGABIT = 1.25e8  # bytes per second
BANDWIDTHS = (GIGABIT, 10 * GIGABIT, 25 * GIGABIT, 100 * GIGABIT)


def profile(name: str) -> Chain:
    return read_profile(PROFILES / f"{name}.txt")


@pytest.mark.parametrize(
    ("name", "layers", "megabytes", "milliseconds"),
    [
        ("alexnet", 23, 244.40336, 85.321),  # 61.1 million weights, as torchvision's
        ("vgg16", 41, 553.430176, 672.535),  # 138.4 million
        ("resnet50", 177, 102.228128, 443.419),  # 25.6 million
        ("resnet101", 347, 178.19664, 411.092),  # 44.5 million
        ("gnmt", 48, 775.063808, 89.416),
    ],
)
def test_profiles_are_read(name: str, layers: int, megabytes: float, milliseconds: float) -> None:
    chain = profile(name)
    assert len(chain) == layers == len(chain.cuts) + 1 == len(chain.names)
    assert sum(chain.parameters) / 1e6 == pytest.approx(megabytes)
    assert sum(chain.seconds) * 1e3 == pytest.approx(milliseconds)


def test_a_residual_crosses_all_cuts_until_it_is_added(tmp_path) -> None:
    words = (
        "node{} -- {} -- forward_compute_time=1.0, backward_compute_time=2.0, "
        "activation_size={}, parameter_size=0.0\n"
    )
    nodes = [("1", "Input0", 7), ("4", "Add", 3), ("2", "Conv", 100), ("3", "Conv", 10)]
    text = "".join(words.format(*node) for node in nodes)
    edges = [(1, 2), (2, 3), (3, 4), (2, 4)]
    text += "\n".join(f"\tnode{a} -- node{b}" for a, b in edges)
    (tmp_path / "own.txt").write_text(text)
    chain = read_profile(tmp_path / "own.txt")
    assert chain.names == ("Input0", "Conv", "Conv", "Add")
    assert chain.cuts == (0, 100, 110)
    assert chain.seconds == (0, 0.003, 0.003, 0.003)


def test_a_line_that_is_no_profile_is_shown(tmp_path) -> None:
    (tmp_path / "own.txt").write_text("\nlayer 1: 3 ms\n")
    with pytest.raises(ValueError, match=r"own.txt, line 2: expected 'id -- .*got 'layer 1: 3 ms'"):
        read_profile(tmp_path / "own.txt")


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize(
    ("name", "published"), [("vgg16", [15, 1]), ("alexnet", [15, 1]), ("resnet50", [8, 4, 4])]
)
def test_never_dearer_than_the_published_cut(name: str, published, bandwidth: float) -> None:
    chain = profile(name)
    theirs = stages.best_stages(chain, 16, bandwidth, published)
    assert [stage.replicas for stage in theirs] == published
    ours = stages.best_stages(chain, 16, bandwidth)
    assert sum(stage.replicas for stage in ours) == 16
    assert stages.seconds(chain, ours, bandwidth) <= stages.seconds(chain, theirs, bandwidth)


@pytest.mark.parametrize("name", ["vgg16", "alexnet"])
def test_the_published_cut_is_found_on_10_gbit(name: str) -> None:
    found = stages.best_stages(profile(name), 16, 10 * GIGABIT)
    assert [stage.replicas for stage in found] == [15, 1]


def all_cuts(layers: int, devices: int):
    for count in range(1, min(layers, devices) + 1):
        for inner in itertools.combinations(range(1, layers), count - 1):
            ends = (0, *inner, layers)
            for marks in itertools.combinations(range(1, devices), count - 1):
                edges = (0, *marks, devices)
                yield [Stage(ends[k], ends[k + 1], edges[k + 1] - edges[k]) for k in range(count)]


def test_brute_force_finds_nothing_better() -> None:
    """Check 300 random chains of at most 8 layers on at most 6 devices."""
    rng = random.Random(1)
    for _ in range(300):
        layers, devices = rng.randint(1, 8), rng.randint(1, 6)
        chain = Chain(
            tuple(rng.uniform(0, 1) for _ in range(layers)),
            tuple(rng.choice((0, 1, 10)) * rng.uniform(0, 1e8) for _ in range(layers)),
            tuple(rng.uniform(0, 1e9) for _ in range(layers - 1)),
        )
        bandwidth = rng.choice((1e8, 1e9, 1e10))
        best = min(stages.seconds(chain, cut, bandwidth) for cut in all_cuts(layers, devices))
        found = stages.seconds(chain, stages.best_stages(chain, devices, bandwidth), bandwidth)
        assert found == pytest.approx(best, rel=1e-9)


def test_resnet101_on_64_devices_takes_less_than_five_seconds() -> None:
    chain = profile("resnet101")
    begin = time.process_time()
    stages.best_stages(chain, 64, 10 * GIGABIT)
    assert time.process_time() - begin < 5
