"""Files that are written in the middle of a window, in which gradients are accumulated."""

from pathlib import Path

import keras
import pytest

from tests.strategy.groups import SECONDS
from tests.sync.test_groups import make
from tests.sync.test_rules import sample
from tests.sync.windows import CHECKS

pytestmark = pytest.mark.timeout(SECONDS + 60)
WORKER = Path(__file__).parent / "workers" / "windows.py"

OFTEN = {"local SGD to one device", "local SGD to every step", "groups to local SGD of four"}
OFTEN |= {"every step to groups", "begun_together"}
QUICK = {"local SGD to one device"}


@pytest.mark.parametrize("case", sample(CHECKS, CHECKS.keys() - OFTEN, pytest.mark.slow, QUICK))
def test_four_devices(case, tmp_path):
    keras.utils.set_random_seed(1)
    CHECKS[case](make, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", CHECKS)
@pytest.mark.parametrize("layout", ["2x2"])
def test_two_processes_of_two_devices(passes, layout, case):
    passes(layout, case)
