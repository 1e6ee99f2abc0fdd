"""Programs of the kinds that Keras's guides show train in grids as on one device, in 64 bits."""

import functools

import pytest
import tensorflow as tf

import tfscale
from tests.strategy.everyday import compare
from tests.strategy.groups import SECONDS
from tests.strategy.guides import PROGRAMS, classifier, fit, result
from tfscale.parallel import deal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]

RULES = {"up": "columns", "down": "rows"}
GRIDS = {
    "stages": (2, lambda: pipelined(2)),
    "zero bubble": (2, lambda: pipelined(2, "zero_bubble")),
    "slices": (2, lambda: {"grid": tfscale.Grid(tensor=2), "tensor": RULES}),
    "parts": (2, lambda: {"shard": "all"}),
    "stages of slices": (4, lambda: pipelined(2, tensor=2) | {"tensor": RULES}),
    "shards of stages": (4, lambda: pipelined(2) | {"shard": "optimizer"}),
}


def pipelined(stages, order="1f1b", **more):
    return {
        "grid": tfscale.Grid(stages=stages, **more),
        "pipeline": tfscale.Pipeline(None, 3, order),
    }


def strategy_of(grid):
    devices, settings = GRIDS[grid]
    names = [f"CPU:{place}" for place in range(devices)]
    return tfscale.ScaleStrategy("ring", devices=names, deadline=60, **settings())


@functools.cache
def on_one_device(name):
    return result(tf.distribute.get_strategy(), name)


QUICK = {("stages", "several_inputs"), ("slices", "own_layers"), ("stages", "callbacks")}


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        pytest.param(grid, name, marks=[] if (grid, name) in QUICK else pytest.mark.full)
        for name in PROGRAMS
        for grid in GRIDS
    ],
)
def test_a_program_of_a_guide_trains_in_a_grid(monkeypatch, grid, name):
    monkeypatch.setattr(deal, "SMALL", 1)
    compare(on_one_device(name), result(strategy_of(grid), name))


@pytest.mark.parametrize("grid", ["stages", "slices", "parts", "stages of slices"])
def test_weights_in_parts_are_not_exported(monkeypatch, tmp_path, grid):
    monkeypatch.setattr(deal, "SMALL", 1)
    with strategy_of(grid).scope():
        model = classifier()
    fit(model, epochs=1)
    with pytest.raises(ValueError, match=r"kernel is held in parts.*and export the loaded model"):
        model.export(tmp_path / "exported", verbose=False)
