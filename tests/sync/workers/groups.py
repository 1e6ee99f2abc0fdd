"""One worker that makes the checks of groups, in turn."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras

import tfscale
from tests.strategy.turns import DEADLINE, WORKERS, take
from tests.sync.groups import CHECKS


def checking(checks):
    """What makes one of these by its name."""

    def check(strategy, name):
        keras.utils.set_random_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            checks[name](make_strategy, Path(folder))

    return check


def make_strategy(sync, replicas=4, **settings):
    devices = [f"CPU:{number}" for number in range(replicas // WORKERS)]
    return tfscale.ScaleStrategy("ring", devices=devices, sync=sync, deadline=DEADLINE, **settings)


if __name__ == "__main__":
    take(checking(CHECKS), "ring")
