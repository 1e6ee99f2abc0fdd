"""Other features of Keras with a model, on two devices of one process and of two processes."""

import itertools

import pytest

from tests.strategy.features import CHECKS
from tests.strategy.groups import SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]


# What takes longest, `make test` does in one layout, or leaves to `make test-all`.
SELDOM = {
    ("2x1", "metrics_of_all_kinds"),
    ("1x2", "metrics_of_the_scope"),
    ("2x1", "metrics_of_the_scope"),
    ("1x2", "predict_joins_tensors_of_each_kind"),
}


def rows():
    for row in itertools.product(("1x2", "2x1"), CHECKS):
        yield pytest.param(*row, marks=[pytest.mark.full] if row in SELDOM else [])


@pytest.mark.parametrize(("layout", "case"), list(rows()))
def test_keras_does_what_it_does_on_one_device(passes, layout, case):
    passes(layout, case)
