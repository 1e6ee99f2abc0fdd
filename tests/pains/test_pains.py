"""Programs of public complaints train under ``ScaleStrategy`` as on one device.

Each test is named by the number of a thread; ``Complaint.title`` quotes its title, and
``docs/pains.md`` lists them with what TensorFlow's own strategies do.
"""

import functools

import pytest

from tests.pains import tutorial
from tests.pains.complaints import COMPLAINTS, LAYOUTS, WORKER
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, take, trained_once

pytestmark = pytest.mark.timeout(2 * SECONDS + 60)


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, WORKER, COMPLAINTS, LAYOUTS)


def refused(words, found):
    """All workers refuse, and say why."""
    for record in found:
        assert words in record.get("error", "it trained").splitlines()[-1]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("layout", "case"), [(complaint.layout, number) for number, complaint in COMPLAINTS.items()]
)
def test_a_complaint_is_settled(trained, layout, case):
    complaint = COMPLAINTS[case]
    found = trained("scale", layout)[case]
    if complaint.refusal:
        return refused(complaint.refusal, found)
    (expected,) = trained("none", "1x1")[case]
    assert "error" not in expected, f"one device: {expected['error']}"
    once_more = functools.partial(take, WORKER, "scale", layout, [case])
    judge(functools.partial(check, complaint, expected), found, lambda: once_more()[case])


def test_the_tutorial_trains_saves_and_restores():
    """All steps of "Multi-worker training with Keras", by a script that has only ``TF_CONFIG``."""
    one, other = tutorial.follow("scale")
    assert one == other
    assert one["history"]["loss"][-1] < one["history"]["loss"][0]
    assert one["lost"] == one["unlike"] == 0
