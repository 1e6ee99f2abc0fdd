"""Programs of everyday train with shares of the batch as on one device, in 64 bits."""

import functools

import pytest
import tensorflow as tf

from tests.strategy.everyday import PROGRAMS, compare, result
from tests.strategy.groups import SECONDS, trained_once
from tests.strategy.restless import make_restless
from tests.strategy.twins import two

pytestmark = pytest.mark.timeout(2 * SECONDS + 60)

SHARES = {"three to one": [3, 1], "hardly any": [1000, 1], "measured": "auto"}
QUICK = {"single_batches", "one_row_each", "windows"}
RARE = {"one_row_each", "generator"}
SEVERAL = ("measured", "several_outputs")
QUICK_OF_WORKERS = {("shares", "arrays"), SEVERAL}


@functools.cache
def on_one_device(name):
    return result(tf.distribute.get_strategy(), name)


def programs_of_devices():
    """Yield all programs with all shares; a replica with hardly any rows has none in ``RARE``."""
    for shares in SHARES:
        for name in PROGRAMS:
            quick = name in (RARE if shares == "hardly any" else QUICK)
            yield pytest.param(shares, name, marks=[] if quick else pytest.mark.full)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("shares", "name"), list(programs_of_devices()))
def test_two_devices(monkeypatch, name, shares):
    make_restless(monkeypatch.setattr)
    compare(on_one_device(name), result(two(shares=SHARES[shares]), name))


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, "everyday.py", PROGRAMS, ["2x1"])


def programs_of_workers():
    for strategy in ("shares", "measured"):
        for name in PROGRAMS:
            marks = [] if (strategy, name) in QUICK_OF_WORKERS else pytest.mark.full
            yield pytest.param(strategy, "2x1", name, marks=marks)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("strategy", "layout", "case"), list(programs_of_workers()))
def test_two_processes(trained, strategy, layout, case):
    for record in trained(strategy, layout)[case]:
        assert "error" not in record, record["error"]
        compare(on_one_device(case), record["result"])
