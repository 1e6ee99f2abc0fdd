"""``shard="all"``: the numbers and the files of one device, with weights in parts."""

import functools

import pytest

from tests.strategy.cases import BY_NAME
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, take, trained_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS + 60)]

QUICK = {
    "1x2": ("adamw", "global_clipnorm", "accumulate_and_clip", "ema_overwrite", "embedding_adam"),
    "2x1": ("adam",),
}


def pairs():
    for layout in ("1x2", "1x4", "2x1", "2x2"):
        for name, case in BY_NAME.items():
            if layout in case.layouts:
                quick = name in QUICK.get(layout, ())
                yield pytest.param(layout, name, marks=[] if quick else pytest.mark.full)


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, "exact.py", BY_NAME, ("1x2", "1x4", "2x1", "2x2"))


@pytest.mark.parametrize(("layout", "case"), list(pairs()))
def test_weights_in_parts_train_as_one_device(trained, layout, case):
    (expected,) = trained("none", "1x1")[case]
    judge(
        functools.partial(check, BY_NAME[case], expected),
        trained("all", layout)[case],
        lambda: take("exact.py", "all", layout, [case])[case],
    )
