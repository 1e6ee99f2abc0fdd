"""Results of ``fit``, ``evaluate`` and ``predict`` on replicas are those of one device."""

import pytest

from tests.keras_like.scenes import rows
from tests.keras_like.trainer import SCENES

pytestmark = pytest.mark.timeout(1800)

QUICK = (
    "has_own MixedInWithNumbers graph 1",
    "judges graph 3",
    "predicts on a batch eager 1",
    "callbacks_hear of 32 rows graph 1",
)


def by_workers(name):
    """Whether workers play it: a worker of one device cannot tell a whole batch from its part."""
    return not name.startswith("predicts on a batch") and not name.endswith(("graph 3", "eager 1"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("layout", "case"), rows(SCENES, QUICK, by_workers))
def test_models_train_as_on_one_device(same_as_one_device, layout, case):
    same_as_one_device(layout, SCENES, case)
