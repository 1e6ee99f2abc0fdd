"""One worker that makes the checks of bounded staleness, in turn."""

from __future__ import annotations

from tests.strategy.turns import take
from tests.sync.staleness import CHECKS
from tests.sync.workers.check import checking, make_strategy

if __name__ == "__main__":
    take(checking(CHECKS, make_strategy), "ring")
