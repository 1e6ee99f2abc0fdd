"""Samples of grids leave out combinations, and no pair of values."""

import dataclasses
import itertools

import pytest

from tests import conftest
from tests.covering import cover, grid, pairs, singles

AXES = [("ring", "tree", "direct"), (1, 2, 3, 4), ("fp32", "int8"), (0, 1, 255)]
PRODUCT = list(itertools.product(*AXES))


def test_each_value_meets_each_value_of_every_other_axis():
    sample = cover(PRODUCT, pairs)
    for (i, one), (j, other) in itertools.combinations(enumerate(AXES), 2):
        met = {(row[i], row[j]) for row in sample}
        assert met == set(itertools.product(one, other))
    assert len(sample) < len(PRODUCT) / 3


def test_each_value_alone_takes_as_many_rows_as_the_longest_axis():
    assert len(cover(PRODUCT, singles)) == 4


def test_a_seed_draws_the_same_rows_in_their_order():
    sample = cover(PRODUCT, pairs, seed=7)
    assert sample == cover(PRODUCT, pairs, seed=7) != cover(PRODUCT, pairs, seed=8)
    assert sample == [row for row in PRODUCT if row in sample]


def test_cheap_rows_are_taken_first():
    rows = [(layout, case) for layout in ("2x2", "1x2") for case in range(9)]

    def aspects(row):
        layout, case = row
        return [case, (layout, case // 3)]

    sample = cover(rows, aspects, cost=lambda row: row[0] == "2x2")
    assert [layout for layout, _ in sample].count("2x2") == 3
    assert len(sample) == 9


def test_values_that_are_equal_are_told_apart():
    """1, 1.0 and True are."""
    assert len(cover(itertools.product([1, 1.0, True], ["x"]), pairs)) == 3


def test_what_is_left_out_is_marked():
    mark = grid("algorithm, ranks, wire, size", *AXES).mark
    names, rows = mark.args
    assert names == ["algorithm", "ranks", "wire", "size"]
    assert [row.values for row in rows] == PRODUCT
    kept = [row.values for row in rows if not row.marks]
    assert kept == cover(PRODUCT, pairs)
    assert {each.name for row in rows for each in row.marks} == {"full"}


@dataclasses.dataclass(eq=False)
class Item:
    nodeid: str
    marks: tuple = ()

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)


FOLDERS = ("ops", "addons")
CASES = [f"tests/{folder}/test_it.py::test[{i}]" for folder in FOLDERS for i in range(16)]


def counted(items):
    return tuple(sum(f"/{folder}/" in each.nodeid for each in items) for folder in FOLDERS)


@pytest.mark.parametrize(("one_in", "left"), [(1, (16, 16)), (8, (2, 2)), (99, (1, 1))])
def test_some_cases_of_each_test_are_drawn(one_in, left):
    assert counted(conftest.taken([Item(name) for name in CASES], one_in)) == left


def test_the_cases_that_are_not_drawn_are_slow_and_full_ones_are_not_drawn():
    full, one_in = pytest.mark.full.mark, pytest.mark.one_in(4).mark
    items = [Item(name, (one_in,) if "/ops/" in name else ()) for name in CASES]
    assert counted(conftest.slow_cases(items)) == (12, 0)
    items = [Item(name, (one_in, *((full,) if "1" in name else ()))) for name in CASES]
    slow = set(conftest.slow_cases(items))
    assert counted(slow) == (6, 6)  # of 9 that are not full
    assert not any("1" in each.nodeid for each in slow)
