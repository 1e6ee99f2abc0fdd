"""Formulas give the figures that their papers print."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings, strategies as st

from tfscale.collectives import Link
from tfscale.plan.formulas import grids
from tfscale.plan.formulas.data_parallel import (
    Training,
    parameter_server,
    reduction_tree,
    ring_all_reduce,
    speed_up,
)
from tfscale.plan.formulas.grids import Grid, Layer
from tfscale.plan.formulas.state import MIXED_ADAM, SHARDS, bytes_per_rank, offload_efficiency
from tfscale.plan.formulas.transformer import Transformer

# ------------------------------------------------------ SPAA 2018

ALEXNET = [
    Layer("c1", 34848, 290400),
    Layer("c2", 307200, 186624),
    Layer("c3", 884736, 64896),
    Layer("c4", 663552, 64896),
    Layer("c5", 442368, 43264),
    Layer("f6", 37748736, 4096),
    Layer("f7", 16777216, 4096),
    Layer("f8", 4096000, 1000),
]
CORI = Link(alpha=2e-6, beta=1 / 6e9)


def milliseconds(ranks: int, rows: int, batch: int = 2048) -> float:
    """AlexNet with pure batch parallelism for convolutions, and a grid for other layers."""
    layouts = [Grid(1, ranks)] * 5 + [Grid(rows, ranks // rows)] * 3
    return 1e3 * grids.seconds(ALEXNET, layouts, batch, CORI)


@pytest.mark.parametrize(
    ("ranks", "rows", "expected"), [(512, 1, 81.4), (512, 16, 12.6), (64, 1, 80.2), (64, 8, 28.6)]
)
def test_alexnet_on_grids(ranks: int, rows: int, expected: float) -> None:
    assert round(milliseconds(ranks, rows), 1) == expected


def test_the_best_grids_are_at_least_as_fast_as_the_papers() -> None:
    for ranks, rows in ((512, 16), (64, 8)):
        found = grids.best_grids(ALEXNET, ranks, 2048, CORI)
        assert 1e3 * grids.seconds(ALEXNET, found, 2048, CORI) <= milliseconds(ranks, rows)
        assert all(grid.rows == 1 for grid in found[:5])  # convolutions: pure batch


def test_the_best_grids_of_any_number_of_ranks_take_less_than_a_second() -> None:
    for ranks in (1, 7, 512, 83160, 98280, 99991, 100_000):
        begin = time.process_time()
        if ranks == 99991:  # a prime number: 1 x 99991 has less than a sample per column
            assert {str(g) for g in grids.best_grids(ALEXNET, ranks, 2048, CORI)} == {"99991x1"}
        else:
            found = grids.best_grids(ALEXNET, ranks, 2048, CORI)
            assert all(g.rows * g.columns == ranks and g.columns <= 2048 for g in found)
        assert time.process_time() - begin < 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 4096))
def test_no_common_grid_beats_the_best_ones(ranks: int, batch: int) -> None:
    best = grids.seconds(ALEXNET, grids.best_grids(ALEXNET, ranks, batch, CORI), batch, CORI)
    for rows in grids.divisors(ranks):
        if ranks // rows <= batch:
            grid = Grid(rows, ranks // rows)
            assert best <= grids.seconds(ALEXNET, [grid] * 8, batch, CORI) * (1 + 1e-12)


def test_images_are_split_where_there_are_more_ranks_than_samples() -> None:
    """Check that halos of 2 rows cost less than activations of whole images."""
    c2 = Layer("c2", 307200, 186624, halo=(2 * 27 * 96, 2 * 27 * 256))
    c1 = ALEXNET[0]
    _, grid = grids.best_grids([c1, c2], ranks=4096, batch=512, link=CORI)
    assert (grid.rows, grid.domain) == (8, True)
    by_images = grids.layer_seconds(c1, c2, grid, 512, CORI)
    assert by_images < grids.layer_seconds(c1, c2, Grid(8, 512), 512, CORI)
    alpha, beta = CORI.alpha, CORI.beta  # two halos of one sample, and a sum over all ranks
    halos = 2 * alpha + 4 * beta * 2 * 27 * (96 + 256)
    assert by_images == pytest.approx(halos + 2 * (12 * alpha + beta * 4 * 307200 * 4095 / 4096))


# ------------------------------------------------------ ZeRO


@pytest.mark.parametrize(
    ("billions", "ranks", "gigabytes"),
    [
        (7.5, 64, {"none": 120, "state": 31.4, "gradients": 16.6, "all": 1.88}),
        (128, 64, {"state": 536, "gradients": 284, "all": 32}),
        (1000, 1024, {"all": 15.6}),
    ],
)
def test_zero(billions: float, ranks: int, gigabytes: dict[str, float]) -> None:
    for shard, expected in gigabytes.items():
        found = bytes_per_rank(billions, ranks, shard, MIXED_ADAM)
        digits = 2 if expected < 10 else 0 if expected > 100 or expected == 32 else 1
        assert round(found, digits) == expected


@given(st.integers(1, 10_000))
def test_adam_in_float32_takes_16_bytes_per_parameter(d: int) -> None:
    expected = (16, 8 + 8 / d, 4 + 12 / d, 16 / d)
    assert [bytes_per_rank(1, d, shard) for shard in SHARDS] == pytest.approx(expected)


def test_zero_infinitys_efficiency() -> None:
    """Check that half of the rate is reached where the slow memory is as fast as the device."""
    assert offload_efficiency(1000, 70e9, 70e12) == 0.5
    assert offload_efficiency(9000, 70e9, 70e12) == pytest.approx(0.9)


# ------------------------------------------------------ Megatron

TEN_MODELS = [  # heads, hidden size, layers, billions of parameters: Table 1 of the paper
    (24, 2304, 24, 1.7),
    (32, 3072, 30, 3.6),
    (32, 4096, 36, 7.5),
    (48, 6144, 40, 18.4),
    (64, 8192, 48, 39.1),
    (80, 10240, 60, 76.1),
    (96, 12288, 80, 145.6),
    (128, 16384, 96, 310.1),
    (128, 20480, 105, 529.6),
    (160, 25600, 128, 1008.0),
]


@pytest.mark.parametrize(("heads", "hidden", "layers", "billions"), TEN_MODELS)
def test_megatrons_ten_models(heads: int, hidden: int, layers: int, billions: float) -> None:
    model = Transformer(layers, hidden, heads, sequence=2048, vocabulary=51200)
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.1)


def test_megatrons_operations_and_activations() -> None:
    l, h, a, s, v, b = 96, 12288, 96, 2048, 51200, 8  # noqa: E741
    model = Transformer(l, h, a, s, v)
    blocks = l * (24 * b * s * h * h + 4 * b * s * s * h)  # multiply and add: forward pass
    assert model.flops(b) == pytest.approx(4 * blocks + 3 * 2 * b * s * h * v)
    assert model.activation_bytes(b) == s * b * h * (34 + 5 * a * s / h)
    assert model.activation_bytes(b, tensor=8) == model.activation_bytes(b) / 8
    alone = s * b * h * (10 + 24 / 8 + 5 * a * s / (8 * h))
    assert model.activation_bytes(b, tensor=8, sequence_parallel=False) == alone


# ------------------------------------------------------ FireCaffe, by Paleo's constants

NIN = Training(7.59e6, 1.94e9, rate=0.21 * 3935e9)
TITAN = Link(alpha=0, beta=8 / (0.56 * 70e9))


@pytest.mark.parametrize(
    ("ranks", "batch", "sums", "expected"),
    [
        (32, 256, reduction_tree, 15.2),
        (128, 1024, reduction_tree, 50.4),  # measured: 39
        (32, 256, parameter_server, 4.1),
        (128, 1024, parameter_server, 4.4),
        (128, 1024, ring_all_reduce, 105.1),
    ],
)
def test_firecaffe(ranks: int, batch: int, sums, expected: float) -> None:
    assert speed_up(NIN, ranks, batch, TITAN, sums) == pytest.approx(expected, abs=0.05)


def test_more_ranks_than_samples_do_not_help() -> None:
    found = [speed_up(NIN, ranks, 32, Link(0, 0), ring_all_reduce) for ranks in (16, 32, 64, 4096)]
    assert found == [16, 32, 32, 32]
