"""One worker that makes the checks of windows, in turn."""

from __future__ import annotations

from tests.strategy.turns import take
from tests.sync.windows import CHECKS
from tests.sync.workers.check import checking
from tests.sync.workers.groups import make_strategy

if __name__ == "__main__":
    take(checking(CHECKS, make_strategy), "ring")
