"""Grids, layouts that are repeated in each team, and rules."""

import re

import pytest
from hypothesis import given, strategies as st

from tfscale.parallel.grid import DATA, EXPERTS, STAGES, TENSOR, Grid
from tfscale.parallel.layout import Owned, Repeated, Split, verify
from tfscale.parallel.rules import KINDS, Rules, checked

sizes = st.integers(1, 4)


@given(sizes, sizes, sizes, sizes)
def test_each_rank_has_one_place(data, stages, tensor, experts):
    grid = Grid(data, stages, tensor, experts).of(data * stages * tensor * experts)
    places = [(grid.part_of_batch(r), grid.stage(r), grid.slice(r)) for r in range(grid.replicas)]
    assert len(set(places)) == len(places) == data * stages * tensor * experts
    assert places == sorted(places), "ranks count up, the slice fastest"
    assert sum(map(grid.gives_outputs, range(grid.replicas))) == data * experts


@given(sizes, sizes, sizes, sizes, st.sets(st.sampled_from([DATA, EXPERTS, STAGES, TENSOR])))
def test_teams_share_the_other_axes_and_cover_all_ranks(data, stages, tensor, experts, axes):
    grid = Grid(data, stages, tensor, experts).of(data * stages * tensor * experts)
    teams = grid.teams(*axes)
    assert sorted(rank for team in teams for rank in team) == list(range(grid.replicas))
    for team in teams:
        assert team == sorted(team)
        for axis, place in (
            (DATA, lambda rank: grid.part_of_batch(rank) // experts),
            (EXPERTS, grid.share_of_experts),
            (STAGES, grid.stage),
            (TENSOR, grid.slice),
        ):
            number = len({place(rank) for rank in team})
            assert number == (getattr(grid, axis) if axis in axes else 1)


def test_a_grid_takes_the_parts_of_the_batch_that_replicas_allow():
    assert Grid(tensor=2).of(6).data == 3
    assert Grid(data=2, stages=2).of(4) == Grid(2, 2, 1)


@pytest.mark.parametrize(
    "grid, replicas, words",
    [
        (Grid(tensor=2), 3, "needs a multiple of 2 replicas, but there are 3"),
        (Grid(tensor=4), 2, "needs a multiple of 4 replicas, but there are 2"),
        (Grid(data=2, tensor=2), 8, "needs 4 replicas, but there are 8"),
        (Grid(experts=2), 3, "needs a multiple of 2 replicas, but there are 3"),
    ],
)
def test_a_grid_that_replicas_do_not_fill_is_refused(grid, replicas, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        grid.of(replicas)


def test_a_team_has_no_part_of_a_workers_replicas():
    Grid(tensor=2).of(8).check_workers(4)
    Grid(tensor=4).of(8).check_workers(2)
    with pytest.raises(ValueError, match="3 replicas into a model team, and each worker has 2"):
        Grid(tensor=3).of(6).check_workers(2)


@given(sizes, sizes, st.sampled_from(["split", "owned"]), st.data())
def test_layouts_that_are_repeated_hold_each_number_equally_often(data, tensor, kind, draw):
    grid = Grid(data, tensor=tensor).of(data * tensor)
    shape = (3 * tensor, 2)
    owner = draw.draw(st.integers(0, tensor - 1))
    inner = Split(shape, tensor, 0) if kind == "split" else Owned(shape, tensor, owner)
    layout = Repeated.of(inner, [grid.slice(rank) for rank in range(grid.replicas)])
    verify(layout)
    assert sum(map(layout.held, range(grid.replicas))) == data * 6 * tensor
    if kind == "owned":
        assert grid.slice(layout.holder) == owner and layout.holder < tensor


def test_rules_count_in_their_order():
    rules = Rules({"up": "columns", "up/kernel": "rows"})
    assert rules.find("block/up/kernel") == ("up", "columns")
    assert rules.find("block/down/kernel") is None
    assert rules.idle(["block/up/kernel"]) == []
    assert rules.idle(["a/kernel"]) == ["up", "up/kernel"]


@pytest.mark.parametrize("rules", [{"a": "diagonal"}, {"(": "rows"}, {1: "rows"}, "rows", ["rows"]])
def test_wrong_rules_are_refused(rules):
    with pytest.raises(ValueError, match="tensor"):
        checked(rules)


def test_the_kinds_are_known():
    of_weights, of_activations = "columns rows heads vocabulary", "length depth height width"
    assert set(KINDS) == {*of_weights.split(), *of_activations.split()}
