"""One worker that makes the checks of features or of randomness, in turn."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras

from tests.strategy import features, randomness
from tests.strategy.turns import take

CHECKS = features.CHECKS | randomness.CHECKS


def check(strategy, name):
    keras.utils.set_random_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        CHECKS[name](strategy, Path(folder))


if __name__ == "__main__":
    take(check, "ring")  # auto may choose otherwise each time, and then other bits come out
