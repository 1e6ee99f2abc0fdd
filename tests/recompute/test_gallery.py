"""Recomputation leaves programs like those on keras.io the same bits. A last batch has one row."""

import keras
import numpy as np
import pytest

from tests.gallery.programs import PROGRAMS
from tests.recompute.orders import RandomOrder
from tfscale.callbacks import Recompute

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def trained(name, recompute=None):
    """All bits that a program's training leaves, and what its user sees."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    program = PROGRAMS[name]
    model = program.build()
    fit = model.fit

    def fit_with(*args, callbacks=(), **settings):
        more = [recompute()] if recompute else []
        return fit(*args, callbacks=[*callbacks, *more], **settings)

    model.fit = fit_with
    seen = program.train(model)
    return [v.numpy().tobytes() for v in model.variables], {
        k: np.asarray(v).tobytes() for k, v in seen.items()
    }


# Its lengths are unknown, so it would need an example.
LENGTHS_VARY = "forecast"


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != LENGTHS_VARY])
def test_a_program_trains_the_same(name):
    plain = trained(name)
    kinds = (
        lambda: Recompute(segments="sqrt", verbose=0),
        lambda: RandomOrder(0),
        lambda: RandomOrder(1),
    )
    for kind in kinds:
        assert trained(name, kind) == plain
