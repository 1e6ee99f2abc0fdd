"""Other features of Keras with a model, on two devices of one process and of two processes."""

import itertools

import pytest

from tests.strategy.features import CHECKS
from tests.strategy.groups import SECONDS

pytestmark = pytest.mark.timeout(SECONDS + 60)


# What takes longest, `make test` does in one layout, or leaves to `make test-all`.
SELDOM = {
    ("2x1", "metrics_of_all_kinds"),
    ("1x2", "metrics_of_the_scope"),
    ("2x1", "metrics_of_the_scope"),
    ("1x2", "predict_joins_tensors_of_each_kind"),
}
# One worker is always the first; and workers do not matter to what a step or a number is.
SELDOM |= {
    ("1x2", "only_the_first_worker_writes"),
    ("1x2", "only_the_first_worker_writes_what_a_list_holds"),
    ("2x1", "numbers_of_python"),
    ("2x1", "what_metrics_return_is_a_number"),
    ("2x1", "jit_is_refused"),
}
# These are about workers, or it is workers that may do them wrongly.
SELDOM |= {
    ("1x2", "model_checkpoint"),
    ("1x2", "backup_and_restore"),  # test_backup.py restores on devices, too
    ("1x2", "tensorboard"),
    ("1x2", "tensorboard_in_rounds"),
    ("1x2", "a_second_strategy"),
}
# These write the weights that all replicas have, as save_and_load does in both layouts.
SELDOM |= {("2x1", "save_and_load_weights"), ("2x1", "export")}


def rows():
    for row in itertools.product(("1x2", "2x1"), CHECKS):
        yield pytest.param(*row, marks=[pytest.mark.full] if row in SELDOM else [])


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("layout", "case"), list(rows()))
def test_keras_does_what_it_does_on_one_device(passes, layout, case):
    passes(layout, case)
