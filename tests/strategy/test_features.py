"""Other features of Keras with a model, on two devices of one process and of two processes."""

import pytest

from tests.strategy.features import CHECKS
from tests.strategy.groups import SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]


@pytest.mark.parametrize("case", CHECKS)
@pytest.mark.parametrize("layout", ["1x2", "2x1"])
def test_keras_does_what_it_does_on_one_device(passes, layout, case):
    passes(layout, case)
