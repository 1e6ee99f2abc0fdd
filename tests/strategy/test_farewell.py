"""One hook for all groups of a process, however many strategies it makes."""

import sys

import tensorflow as tf

from tfscale.strategy import farewell

KNOWN_TO_ALL = b"tfscale/known-to-all"
ERROR_IN_A_GRAPH = """Graph execution error:

Detected at node Sum defined at (most recent call last):
  File "train.py", line 3, in <module>

bucket 'sums': rank 1 (worker 1) is gone
\t [[{{node Sum}}]] [Op:__inference_step_1]"""


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
    farewell.when_the_program_ends(groups[:1])
    hook = sys.excepthook
    farewell.when_the_program_ends(groups[1:])
    assert sys.excepthook is hook
    hook(KeyError, KeyError("no such row"), None)
    assert len(printed) == 1
    assert [one.reasons for one in groups] == [["its program failed: KeyError: 'no such row'"]] * 3


def test_what_all_of_a_part_know_is_told_to_those_around_it(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(farewell, "_groups", [])
    monkeypatch.setattr(farewell, "_wider", [])
    everybody, part = Told(), Told()
    farewell.when_the_program_ends([everybody])
    farewell.when_the_program_ends([part], within=[everybody])
    lost = tf.errors.UnavailableError(None, None, ERROR_IN_A_GRAPH, {KNOWN_TO_ALL: b"1"})
    sys.excepthook(type(lost), lost, None)
    assert part.reasons == []
    assert everybody.reasons == ["its group failed: bucket 'sums': rank 1 (worker 1) is gone"]


def test_with_nobody_to_tell_nothing_happens(monkeypatch):
    monkeypatch.setattr(farewell, "_groups", [])
    farewell.say("nobody hears it")
