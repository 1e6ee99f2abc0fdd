"""Rules on several devices of one process, and on several processes."""

import functools
from pathlib import Path

import keras
import pytest

from tests.strategy.groups import SECONDS
from tests.sync.checks import CHECKS, NUMBERS
from tfscale import ScaleStrategy

pytestmark = pytest.mark.timeout(SECONDS + 60)
WORKER = Path(__file__).parent / "workers" / "check.py"

# What `make test` does in several processes; it does the others on several devices, and leaves
# some of them to `make test-all`.
PROCESSES = {"diloco", "silence", "workers_with_other_numbers_of_batches", "taken_up_again"}
PROCESSES |= {"stream", "stream_of_workers_with_other_numbers_of_batches"}
PROCESSES |= {"read_by_a_callback", "gossip_by_an_own_graph"}
SELDOM = {"local_sgd", "growing", "diloco_with_another_outer", "one_step_rounds"}
SELDOM |= {"gossip_in_a_ring", "gossip_in_pairs", "gossip_by_an_own_graph"}
SELDOM |= {"fragments", "stream_of_one_fragment", "stream_of_programs"}
SELDOM |= {"programs", "mixed_precision", "optimizers", "other_types"}


def sample(cases, seldom):
    """All cases; some only in full runs."""
    return [pytest.param(c, marks=[pytest.mark.full] if c in seldom else []) for c in cases]


def make(devices, sync, **settings):
    names = [f"CPU:{i}" for i in range(devices)]
    return ScaleStrategy("ring", None, names, sync=sync, **settings)


@pytest.mark.parametrize("case", sample(CHECKS, SELDOM | PROCESSES))
def test_two_devices(case, tmp_path):
    keras.utils.set_random_seed(1)
    CHECKS[case](functools.partial(make, 2), tmp_path)


@pytest.mark.parametrize("case", sample(NUMBERS, NUMBERS.keys() - {"elastic", "gossip"}))
def test_four_devices(case, tmp_path):
    CHECKS[case](functools.partial(make, 4), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(CHECKS, CHECKS.keys() - PROCESSES))
@pytest.mark.parametrize("layout", ["2x1"])
def test_two_processes(passes, layout, case):
    passes(layout, case)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("case", CHECKS)
@pytest.mark.parametrize("layout", ["2x2"])
def test_two_processes_of_two_devices(passes, layout, case):
    passes(layout, case)
