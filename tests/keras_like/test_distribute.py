"""Variables, values, state and metrics of replicas are those of one device."""

import pytest

from tests.keras_like.distribute import SCENES
from tests.keras_like.scenes import rows

pytestmark = pytest.mark.timeout(1800)

QUICK = (
    "variables_are_assigned_on_replicas sum graph",
    "replicas_reduce graph",
    "layers_keep_state",
)


@pytest.mark.parametrize(("layout", "case"), rows(SCENES, QUICK))
def test_replicas_are_as_one_device(same_as_one_device, layout, case):
    same_as_one_device(layout, SCENES, case)
