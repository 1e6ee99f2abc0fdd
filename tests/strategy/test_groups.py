"""Choice of the cases of a group of workers, and its judgement: what others caused is reported."""

from types import SimpleNamespace

import pytest

from tests.strategy.groups import chosen, judge


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


def item(path, fixture, **params):
    return SimpleNamespace(
        path=path, fixturenames=[fixture], callspec=SimpleNamespace(params=params)
    )


ITEMS = [
    item("one.py", "trained", layout="1x2", case="adam"),
    item("one.py", "trained", layout="2x1", case="sgd"),
    item("one.py", "passes", layout="1x2", case="lamb"),
    item("two.py", "trained", layout="1x2", case="sgd"),
    SimpleNamespace(path="one.py"),
]


@pytest.mark.parametrize(
    ("scope", "path", "cases"),
    [
        ("module", "one.py", ["adam"]),
        ("module", "two.py", ["sgd"]),
        ("session", None, ["sgd", "adam"]),
    ],
)
def test_a_group_takes_what_tests_of_its_module_ask_for(scope, path, cases):
    request = SimpleNamespace(
        session=SimpleNamespace(items=ITEMS), scope=scope, path=path, fixturename="trained"
    )
    assert chosen(request, ["lamb", "sgd", "adam"], ["1x2"]) == cases
