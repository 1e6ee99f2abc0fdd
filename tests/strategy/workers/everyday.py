"""One worker that runs everyday programs and says what came of each."""

from __future__ import annotations

from tests.strategy.everyday import result
from tests.strategy.turns import take

if __name__ == "__main__":
    take(lambda strategy, name: {"result": result(strategy, name)})
