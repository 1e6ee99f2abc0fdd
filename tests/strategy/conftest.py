"""Checks that workers make: all that were selected, in one group per layout."""

import functools

import pytest

from tests.strategy.groups import chosen, judge, take


def check(records):
    for worker, record in enumerate(records):
        if "skipped" in record:
            pytest.skip(record["skipped"])
        assert "error" not in record, f"worker {worker}: {record['error']}"


@pytest.fixture
def float64():
    """Keras computes in float64 during a test."""
    from tests.strategy.doubles import doubles

    with doubles():
        yield


@pytest.fixture(scope="session")
def passes(request):
    """Asserts that a check passed on all workers of a layout, which start at the first check."""
    from tests.strategy import features, randomness

    checks = features.CHECKS | randomness.CHECKS
    make = functools.partial(take, "check.py", "scale")

    @functools.cache
    def made(layout):
        return make(layout, chosen(request, checks, [layout]))

    def ask(layout, case):
        judge(check, made(layout)[case], lambda: make(layout, [case])[case])

    return ask
