"""Random layers: other masks on every replica, the same ones again from the same seed."""

import pytest

from tests.strategy.groups import SECONDS
from tests.strategy.randomness import CHECKS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]


@pytest.mark.parametrize("case", CHECKS)
@pytest.mark.parametrize("layout", ["1x2", "2x1", "2x2"])
def test_random_layers(passes, layout, case):
    passes(layout, case)
