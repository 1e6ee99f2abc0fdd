"""Measured shares that change after each step or two, whatever the steps cost."""

from tfscale.strategy.batch import balance, share_search


def make_restless(put=setattr):
    """Make them so; ``put(module, name, value)`` sets a constant."""
    put(balance, "WARM_UP", 0)
    put(share_search, "FIRST_WINDOW", 1)
    put(share_search, "LAST_WINDOW", 1)
    put(share_search, "WORTHWHILE", -1)
