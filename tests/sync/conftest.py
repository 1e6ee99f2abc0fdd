"""Fixtures of the tests of rules, of groups and of windows."""

import pytest

from tests.sync.processes import passing


@pytest.fixture(scope="module")
def passes(request):
    """Asks whether a check of the module has passed in a layout of its workers."""
    return passing(request, request.module.WORKER, request.module.CHECKS)
