"""A wait for other workers ends with the error of what it does meanwhile."""

import asyncio

import pytest

from tfscale.cluster.gathering import Gathering


class Broken(Gathering):
    advice = "Check nothing"

    def _activities(self):
        return [self._fails()]

    async def _fails(self):
        raise ZeroDivisionError("of an activity")

    def _name(self):
        return "worker 0"

    def _missing(self):
        return "worker 1"


def test_an_activity_that_fails_ends_the_wait():
    """The wait would otherwise last until the timeout, with an error that names other workers."""
    with pytest.raises(ZeroDivisionError, match="of an activity"):
        asyncio.run(Broken(3.0, print).run())
