"""Layouts: every number is held once or by all, and parts make the whole again."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies as st

from tfscale.parallel import deal
from tfscale.parallel.grid import Grid
from tfscale.parallel.layout import Copy, Flat, Layout, Owned, Repeated, SharedOut, Split, verify
from tfscale.parallel.matrix import Matrix

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)
ranks = st.integers(1, 6)


@st.composite
def layouts(draw, shape=shapes, ranks=ranks):
    shape, ranks = draw(shape), draw(ranks)
    kinds = [
        Copy(shape, ranks),
        Flat(shape, ranks),
        Owned(shape, ranks, draw(st.integers(0, ranks - 1))),
    ]
    kinds += [Split(shape, ranks, axis) for axis in range(len(shape))]
    return draw(st.sampled_from(kinds))


def numbers(shape):
    return tf.reshape(tf.range(float(math.prod(shape))), shape)


@given(layouts())
def test_parts_make_the_whole_again(layout):
    verify(layout)
    whole = numbers(layout.shape)
    parts = [layout.part(whole, rank) for rank in range(layout.ranks)]
    assert [tuple(part.shape) for part in parts] == [
        layout.part_shape(rank) for rank in range(layout.ranks)
    ]
    np.testing.assert_array_equal(layout.whole(parts), whole)
    flat = whole.numpy().ravel()
    for rank, part in enumerate(parts):
        held = part.numpy().ravel()[: layout.held(rank)]
        np.testing.assert_array_equal(held, flat[list(layout.places(rank))])


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_what_stages_and_slices_hold_is_shared_out_among_those_who_hold_the_same(
    data, stages, tensor, draw
):
    """Each number is then held once."""
    grid = Grid(data, stages, tensor)
    shape = (draw.draw(st.integers(0, 4)), draw.draw(st.integers(1, 3)))
    ranks, stage = range(grid.replicas), draw.draw(st.integers(0, stages - 1))
    slices = [grid.slice(rank) if grid.stage(rank) == stage else None for rank in ranks]
    layouts = [
        (
            Repeated.of(Owned(shape, stages, stage), list(map(grid.stage, ranks))),
            ["data", "tensor"],
        ),
        (Repeated.of(Split(shape, tensor, 0), slices), ["data"]),
        (Repeated.of(Split(shape, tensor, 1), list(map(grid.slice, ranks))), ["data", "stages"]),
    ]
    whole = numbers(shape)
    for outer, axes in layouts:
        teams = grid.teams(*axes)
        kind = draw.draw(st.sampled_from([Flat, Owned]))
        inners = [kind(outer.part_shape(team[0]), len(team)) for team in teams]
        layout = SharedOut.of(outer, teams, inners)
        for each in (outer, layout):
            verify(each)
            parts = [each.part(whole, rank) for rank in ranks]
            assert [tuple(x.shape) for x in parts] == [each.part_shape(rank) for rank in ranks]
            np.testing.assert_array_equal(each.whole(parts), whole)
        assert sum(layout.held(rank) for rank in ranks) == math.prod(shape)
        if layout.holder is not None:
            np.testing.assert_array_equal(layout.part(whole, layout.holder), whole)


@given(st.lists(shapes.filter(math.prod), min_size=1, max_size=4), ranks, st.booleans())
def test_a_matrix_holds_what_each_rank_is_to_hold(shapes, ranks, even):
    made = (deal.in_parts if even else deal.whole)(shapes, ranks)
    matrix, wholes = Matrix(tuple(made)), [numbers(shape) + 1 for shape in shapes]
    rows = matrix.of_wholes(wholes)
    assert rows.shape == (ranks, matrix.columns)
    for rank in range(ranks):
        parts = matrix.parts(rows[rank], rank)
        for part, layout, whole in zip(parts, made, wholes, strict=True):
            np.testing.assert_array_equal(part, layout.part(whole, rank))
        np.testing.assert_array_equal(matrix.row(parts)[0], rows[rank])
    for found, whole in zip(matrix.wholes(rows), wholes, strict=True):
        np.testing.assert_array_equal(found, whole)


class Lacking(Flat):
    """A wrong layout, whose last rank holds nothing."""

    def places(self, rank):
        return iter(()) if rank == self.ranks - 1 else super().places(rank)

    def held(self, rank):
        return Layout.held(self, rank)


class Twice(Flat):
    """A wrong layout: two ranks hold the first number."""

    def range(self, rank):
        return range(0, 1) if rank == 1 else super().range(rank)


@pytest.mark.parametrize("wrong", [Lacking((6,), 3), Twice((6,), 3)], ids=["lacking", "twice"])
def test_a_wrong_layout_is_found(wrong):
    with pytest.raises(ValueError, match="ranks hold a number; expected the same"):
        verify(wrong)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 8))
def test_whole_weights_are_dealt_evenly(sizes, ranks):
    dealt = deal.whole([(size,) for size in sizes], ranks)
    held = [sum(layout.held(rank) for layout in dealt) for rank in range(ranks)]
    least = max(sum(sizes) / ranks, max(sizes))
    assert max(held) <= (4 / 3) * least + max(sizes) / 3
    assert sum(held) == sum(sizes)
