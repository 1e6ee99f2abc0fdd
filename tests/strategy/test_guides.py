"""Programs of the kinds that Keras's guides show train in grids as on one device, in 64 bits."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.strategy.everyday import compare
from tests.strategy.groups import SECONDS
from tests.strategy.guides import PROGRAMS, classifier, fit, numbers, result
from tfscale.parallel import deal

pytestmark = pytest.mark.timeout(SECONDS)

RULES = {r"\bup\b": "columns", r"\bdown\b": "rows"}  # "group_normalization" has an "up", too
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


QUICK = {
    ("stages", "several_inputs"),
    ("slices", "own_layers"),
    ("stages", "callbacks"),
    ("stages", "attention"),
    ("stages", "sparse"),
}


@pytest.mark.one_in(6)
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


@pytest.mark.parametrize(
    "grid",
    [
        *(pytest.param(grid, marks=pytest.mark.slow) for grid in ("stages", "slices", "parts")),
        "stages of slices",
    ],
)
def test_outside_of_the_scope_a_model_is_whole_and_is_not_exported(monkeypatch, tmp_path, grid):
    monkeypatch.setattr(deal, "SMALL", 1)
    with strategy_of(grid).scope():
        model = classifier()
    fit(model, epochs=1)
    x, _, _ = numbers()
    np.testing.assert_allclose(model(x), model.predict(x, verbose=0), atol=1e-6)
    with pytest.raises(ValueError, match=r"kernel is held in parts.*and export that model"):
        model.export(tmp_path / "exported", verbose=False)
