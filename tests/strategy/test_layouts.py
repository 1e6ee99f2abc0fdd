"""Programs train in all grids as on one device: the table of docs/large-models.md.

50 steps; float64 shows a wrong sum, float32 what a user sees. Copies have the same bits.
"""

import functools

import pytest

from tests.strategy.compare import check, largest
from tests.strategy.groups import SECONDS, chosen, judge, take
from tfscale.bridge.installed import KERAS_2

pytestmark = [
    pytest.mark.skipif(KERAS_2, reason="grids need Keras 3"),
    pytest.mark.timeout(2 * SECONDS + 60),
]

if not KERAS_2:
    from tests.strategy.layouts import BY_NAME, GRIDS, LAYOUTS

QUICK = {
    "transformer/TP2 x PP2/float64/adam",
}


def cells():
    for name, cell in () if KERAS_2 else BY_NAME.items():
        for layout in LAYOUTS[GRIDS[cell.grid][0]]:
            quick = layout == "1x4" and name in QUICK
            yield pytest.param(layout, name, marks=[] if quick else pytest.mark.full)


@pytest.fixture(scope="module")
def trained(request):
    """Records of the selected cells of one program: all programs would take a group for hours."""

    @functools.cache
    def outcome(layout, program):
        layouts = ("1x2", "1x3", "1x4", "2x2", "4x1") if layout == "1x1" else [layout]
        cases = [c for c in chosen(request, BY_NAME, layouts) if BY_NAME[c].program == program]
        if layout == "1x1":
            cases = list(dict.fromkeys(BY_NAME[case].alone for case in cases))
        return take("layouts.py", "none", layout, cases)

    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "case"), list(cells()))
def test_a_program_trains_in_a_grid_as_on_one_device(trained, record_property, layout, case):
    cell = BY_NAME[case]
    (expected,) = trained("1x1", cell.program)[cell.alone]

    def compare(found):
        check(cell, expected, found)
        far = max(largest(expected, each, cell.logits) for each in found)
        record_property("largest difference", far)

    judge(
        compare,
        trained(layout, cell.program)[case],
        lambda: take("layouts.py", "none", layout, [case])[case],
    )
