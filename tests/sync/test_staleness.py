"""Bounded staleness on several devices of one process, and on several processes."""

import functools
from pathlib import Path

import keras
import pytest

from tests.strategy.groups import SECONDS
from tests.sync.checks import sample
from tests.sync.staleness import CHECKS
from tfscale import ScaleStrategy

pytestmark = pytest.mark.timeout(SECONDS + 60)
WORKER = Path(__file__).parent / "workers" / "staleness.py"

# What `make test` does in several processes, and what it leaves to `make test-all`.
PROCESSES = {"late", "synchronous", "backup", "refused", "never_later_than_the_bound"}
PROCESSES |= {"left_out", "named"}
BOTH = {"synchronous"}  # on several devices, too
SELDOM = {"stability of all delays", "never_later_than_the_bound in many steps"}
ALONE = [case for case in CHECKS if not case.startswith(("never_later", "left_out", "named"))]

QUICK = {"on_a_wire", "explained"}  # on two devices


def make(devices, sync, **settings):
    names = [f"CPU:{i}" for i in range(devices)]
    return ScaleStrategy("ring", devices=names, sync=sync, **settings)


@pytest.mark.parametrize("case", sample(ALONE, SELDOM | PROCESSES - BOTH, pytest.mark.slow, QUICK))
def test_two_devices(case, tmp_path):
    keras.utils.set_random_seed(1)
    CHECKS[case](functools.partial(make, 2), tmp_path)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", sample(CHECKS, CHECKS.keys() - PROCESSES))
@pytest.mark.parametrize("layout", ["2x1"])
def test_two_processes(passes, layout, case):
    passes(layout, case)
