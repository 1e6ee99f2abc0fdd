"""Optimizers apply on replicas what they would on one device."""

import pytest

from tests.keras_like.optimizer import EVERY, SCENES
from tests.keras_like.scenes import rows

pytestmark = pytest.mark.timeout(1800)

QUICK = (
    "Adam accumulate and clip graph",
    "average of 0.5, overwritten 3, accumulated 2",
    "public_names",
    "scales_of_losses clipped with_an_overflow graph",
)


def by_workers(name):
    """All but the settings of each optimizer: those of one do."""
    kind, _, setting = name.partition(" ")
    return kind not in EVERY or kind == "Adam" or setting.startswith("plain")


@pytest.mark.parametrize(("layout", "case"), rows(SCENES, QUICK, by_workers))
def test_optimizers_are_as_on_one_device(same_as_one_device, layout, case):
    same_as_one_device(layout, SCENES, case)
