"""k replicas = one device: every case of the table, in every layout.

``make test`` trains nearly each case in a layout, and each part of the table in several layouts;
``make test-all`` trains all cases in all layouts.

One group of workers per layout trains all cases that were selected (`-k "1x2 and clip"` trains
just those), one process without a strategy makes the references, and each test compares.
"""

import functools

import pytest

from tests.covering import params
from tests.strategy.cases import BY_NAME, LAYOUTS, aspects, cost, rows
from tests.strategy.compare import check, differences, unequal
from tests.strategy.groups import SECONDS, judge, take, trained_once
from tests.strategy.models import EPOCHS

pytestmark = pytest.mark.timeout(2 * SECONDS + 60)


train = functools.partial(take, "exact.py")


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, "exact.py", BY_NAME, (*LAYOUTS, "none"))


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("layout", "case"), params(rows(), aspects, cost))
def test_replicas_train_as_one_device(trained, layout, case, record_property):
    (expected,) = trained("none", "1x1")[case]
    assert "error" not in expected, f"one device: {expected['error']}"
    found = trained("scale", layout)[case]
    record_property("seconds", [record.get("seconds") for record in found])
    judge(
        functools.partial(check, BY_NAME[case], expected),
        found,
        lambda: train("scale", layout, [case])[case],
    )


# Known to differ from one device in TensorFlow's own strategy: the check can fail.
STOCK = ("clipnorm", "last_batch_of_1", "masked", "batch_norm")


@pytest.fixture(scope="module")
def stock():
    return train("stock", "1x2", STOCK)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "case"), [("none", case) for case in STOCK])
def test_the_check_tells_strategies_apart(trained, stock, layout, case):
    (expected,), found = trained(layout, "1x1")[case], stock[case]
    assert any(
        line.startswith("weights") for line in differences(BY_NAME[case], expected, found[0])
    )
    assert any(unequal(found)) == (case == "batch_norm")


@pytest.mark.parametrize(("layout", "case"), [("none", "float16_overflow")])
def test_the_overflow_case_overflows(trained, layout, case):
    """Once per epoch: skipped on one device too, and the scale is halved each time."""
    (record,) = trained(layout, "1x1")[case]
    (scale,) = [value for name, value in record["seen"].items() if name.endswith("dynamic_scale")]
    assert scale == 2**15 / 2**EPOCHS
