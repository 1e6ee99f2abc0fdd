"""k replicas = one device: every case of the table, in every layout.

One group of workers per layout trains all cases that were selected (`-k "1x2 and clip"` trains
just those), one process without a strategy makes the references, and each test compares.
"""

import functools

import numpy as np
import pytest

from tests.strategy.cases import BY_NAME, LAYOUTS, names
from tests.strategy.groups import SECONDS, chosen, judge, take
from tests.strategy.models import EPOCHS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS + 60)]


train = functools.partial(take, "exact.py")


@pytest.fixture(scope="session")
def trained(request):
    """Trains what the selected tests need, when the first of them asks."""

    @functools.cache
    def outcome(strategy, layout):
        layouts = LAYOUTS if strategy == "none" else [layout]
        return train(strategy, layout, chosen(request, BY_NAME, layouts))

    return outcome


def spread(expected, found, relative):
    """The largest difference; of numbers above one as a share of them, where that is asked."""
    expected, found = np.asarray(expected), np.asarray(found)
    if expected.shape != found.shape:
        return f"has shape {found.shape}, one device has {expected.shape}"
    size = np.maximum(1, np.abs(expected)) if relative else 1
    return float(np.max(np.abs(found - expected) / size, initial=0))


def differences(case, expected, record):
    """Sentences; none when all is the same."""
    for kind in ("weights", "seen"):
        for name in sorted(expected[kind].keys() ^ record[kind].keys()):
            yield f"{kind} {name}: only {'one device' if name in expected[kind] else 'replicas'}"
        for name in expected[kind].keys() & record[kind].keys():
            wrong = spread(expected[kind][name], record[kind][name], relative=kind == "seen")
            if isinstance(wrong, str) or not wrong <= case.tolerance:
                yield f"{kind} {name}: off by {wrong}, {case.tolerance} may"


def unequal(records):
    """The variables whose bits are not the same on all replicas of all workers."""
    for name in records[0]["digests"]:
        found = [digest for record in records for digest in record["digests"][name]]
        if len(set(found)) > 1:
            yield f"{name}: {found}"


def check(case, expected, found):
    for worker, record in enumerate(found):
        assert "error" not in record, f"worker {worker}: {record['error']}"
    assert not list(unequal(found)), "replicas have other bits:\n" + "\n".join(unequal(found))
    for worker, record in enumerate(found):
        wrong = list(differences(case, expected, record))
        assert not wrong, f"worker {worker} of {len(found)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("layout", "case"), [(layout, case) for layout in LAYOUTS for case in names(layout)]
)
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


@pytest.fixture(scope="session")
def stock():
    return train("none", "1x1", STOCK), train("stock", "1x2", STOCK)


@pytest.mark.parametrize("name", STOCK)
def test_the_check_tells_strategies_apart(stock, name):
    (expected,), found = stock[0][name], stock[1][name]
    assert any(
        line.startswith("weights") for line in differences(BY_NAME[name], expected, found[0])
    )
    assert any(unequal(found)) == (name == "batch_norm")


def test_the_overflow_case_overflows():
    """Once per epoch: skipped on one device too, and the scale is halved each time."""
    ((record,),) = train("none", "1x1", ["float16_overflow"]).values()
    (scale,) = [value for name, value in record["seen"].items() if name.endswith("dynamic_scale")]
    assert scale == 2**15 / 2**EPOCHS
