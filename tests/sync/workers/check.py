"""One worker that makes the checks of rules, in turn."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras

import tfscale
from tests.strategy.turns import DEADLINE, take
from tests.sync.checks import CHECKS


def checking(checks, make):
    """Return a function that makes one of these checks by its name."""

    def check(strategy, name):
        keras.utils.set_random_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            checks[name](make, Path(folder))

    return check


def make_strategy(sync, **settings):
    return tfscale.ScaleStrategy("ring", sync=sync, deadline=DEADLINE, **settings)


if __name__ == "__main__":
    take(checking(CHECKS, make_strategy), "ring")
