"""Programs of the kinds that keras.io shows train on replicas as on one device."""

import functools
import itertools

import pytest

from tests.gallery.programs import LAYOUTS, PROGRAMS, QUICK, QUICK_LAYOUTS, WORKER
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, take, trained_once

pytestmark = pytest.mark.timeout(2 * SECONDS + 60)


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, WORKER, PROGRAMS, LAYOUTS)


def pairs():
    """Yield all programs in all layouts; CI trains quick ones, by turns in a layout."""
    turns = dict(zip(QUICK, itertools.cycle(QUICK_LAYOUTS)))
    for layout in LAYOUTS:
        for name in PROGRAMS:
            quick = turns.get(name) == layout
            yield pytest.param(layout, name, marks=[] if quick else pytest.mark.full)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("layout", "case"), list(pairs()))
def test_a_program_trains_as_on_one_device(trained, layout, case):
    (expected,) = trained("none", "1x1")[case]
    assert "error" not in expected, f"one device: {expected['error']}"
    found = trained("scale", layout)[case]
    once_more = functools.partial(take, WORKER, "scale", layout, [case])
    judge(functools.partial(check, PROGRAMS[case], expected), found, lambda: once_more()[case])
