"""Random layers: other masks on every replica, the same ones again from the same seed."""

import itertools

import pytest

from tests.strategy.groups import SECONDS
from tests.strategy.randomness import CHECKS

pytestmark = pytest.mark.timeout(SECONDS + 60)


# `make test` compares masks where there are most replicas, and goes by seeds in each process.
QUICK = {("2x2", name) for name in CHECKS if name.startswith("masks")}
QUICK |= {("2x1", name) for name in CHECKS if not name.startswith("masks")}
QUICK |= {("1x2", "the_seed_decides"), ("1x2", "a_checkpoint_restores_the_seeds")}


def rows():
    for row in itertools.product(("1x2", "2x1", "2x2"), CHECKS):
        yield pytest.param(*row, marks=[] if row in QUICK else [pytest.mark.full])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("layout", "case"), list(rows()))
def test_random_layers(passes, layout, case):
    passes(layout, case)
