"""Judgement of groups of workers: a failure that others have caused is reported, not hidden."""

import pytest

from tests.strategy.groups import judge


def check(number):
    assert number == 1, f"{number} is not 1"


def test_what_passes_is_not_run_again():
    judge(check, 1, lambda: pytest.fail("it was run again"))


def test_what_passes_in_fresh_processes_alone_is_told():
    with pytest.warns(UserWarning, match="passed in fresh processes only; before that: 2 is not 1"):
        judge(check, 2, lambda: 1)


def test_what_fails_in_fresh_processes_fails():
    with pytest.raises(AssertionError, match="3 is not 1"):
        judge(check, 2, lambda: 3)
