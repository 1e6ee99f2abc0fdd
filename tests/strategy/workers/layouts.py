"""One worker that trains programs in grids, and says what came of each."""

from __future__ import annotations

import tensorflow as tf

from tests.strategy import layouts
from tests.strategy.turns import DEADLINE, DEVICES, WORKERS, take
from tests.strategy.workers.exact import results


def record(_, name):
    """Return the results of one cell."""
    import tfscale
    from tfscale.parallel import deal

    cell, strategy = layouts.BY_NAME[name], tf.distribute.get_strategy()
    deal.SMALL = 1  # the models are small
    if WORKERS * DEVICES > 1:
        devices = [f"CPU:{place}" for place in range(DEVICES)]
        settings = layouts.settings_of(cell.grid, cell.program)
        strategy = tfscale.ScaleStrategy("ring", devices=devices, deadline=DEADLINE, **settings)
    model, seen = layouts.trained(strategy, cell)
    return results(strategy, model, seen)


if __name__ == "__main__":
    take(record)
