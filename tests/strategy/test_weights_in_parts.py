"""Weights in parts, with the numbers and the files of one device.

Parts are equal shares (``shard="all"``), or slices that the replicas of a team hold. In the cases
of the table no layer knows of parts: each reads whole weights.
"""

import functools

import pytest

from tests.strategy.cases import BY_NAME
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, take, trained_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS + 60)]

QUICK = {
    ("all", "1x2"): (
        *("adamw", "global_clipnorm", "accumulate_and_clip", "ema_overwrite", "embedding_adam"),
    ),
    ("all", "2x1"): ("adam",),
    ("grid", "1x2"): ("batch_norm", "global_clipnorm", "embedding_adam", "last_batch_of_1"),
    ("grid", "2x2"): ("adam",),
}


def pairs():
    for strategy in ("all", "grid"):
        for layout in ("1x2", "1x4", "2x1", "2x2"):
            quick = QUICK.get((strategy, layout), ())
            for name, case in BY_NAME.items():
                if layout in case.layouts:
                    marks = [] if name in quick else pytest.mark.full
                    yield pytest.param(strategy, layout, name, marks=marks)


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, "exact.py", BY_NAME, ("1x2", "1x4", "2x1", "2x2"))


@pytest.mark.parametrize(("strategy", "layout", "case"), list(pairs()))
def test_weights_in_parts_train_as_one_device(trained, strategy, layout, case):
    (expected,) = trained("none", "1x1")[case]
    judge(
        functools.partial(check, BY_NAME[case], expected),
        trained(strategy, layout)[case],
        lambda: take("exact.py", strategy, layout, [case])[case],
    )
