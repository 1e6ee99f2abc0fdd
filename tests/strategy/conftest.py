"""Checks that workers make: all that were selected, in one group per layout."""

import functools

import pytest

from tests.strategy.groups import chosen, take


@pytest.fixture(scope="session")
def made(request):
    """The records of a layout's checks; its workers start when the first test asks."""

    @functools.cache
    def outcome(layout):
        from tests.strategy import features, randomness

        checks = features.CHECKS | randomness.CHECKS
        return take("check.py", "scale", layout, chosen(request, checks, [layout]))

    return outcome


@pytest.fixture
def passes(made):
    """Asserts that a check passed on all workers of a layout."""

    def ask(layout, case):
        for worker, record in enumerate(made(layout)[case]):
            if "skipped" in record:
                pytest.skip(record["skipped"])
            assert "error" not in record, f"worker {worker}: {record['error']}"

    return ask
