"""One hook for all groups of a process, however many strategies it makes."""

import sys

from tfscale.strategy import farewell


class Told:
    def __init__(self):
        self.reasons = []

    def give_up(self, reason, linger):
        self.reasons.append(reason)


def test_the_hook_is_set_once_and_tells_all_groups(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append(error))
    monkeypatch.setattr(farewell, "_groups", [])
    groups = [Told(), Told(), Told()]
    farewell.when_the_program_fails(groups[:1])
    hook = sys.excepthook
    farewell.when_the_program_fails(groups[1:])
    assert sys.excepthook is hook
    hook(KeyError, KeyError("no such row"), None)
    assert len(printed) == 1
    assert [one.reasons for one in groups] == [["its program failed: KeyError: 'no such row'"]] * 3


def test_with_nobody_to_tell_nothing_happens(monkeypatch):
    monkeypatch.setattr(farewell, "_groups", [])
    farewell.say("nobody hears it")
