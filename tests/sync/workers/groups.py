"""One worker that makes the checks of groups, in turn."""

from __future__ import annotations

import tfscale
from tests.strategy.turns import DEADLINE, WORKERS, take
from tests.sync.groups import CHECKS
from tests.sync.workers.check import checking


def make_strategy(sync, replicas=4, **settings):
    devices = [f"CPU:{number}" for number in range(replicas // WORKERS)]
    return tfscale.ScaleStrategy("ring", devices=devices, sync=sync, deadline=DEADLINE, **settings)


if __name__ == "__main__":
    take(checking(CHECKS, make_strategy), "ring")
