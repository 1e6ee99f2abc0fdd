"""One hook for all groups of a process, however many strategies it makes."""

import atexit
import re
import sys

import pytest
import tensorflow as tf

from tests import warm
from tfscale.strategy.workers import shutdown

KNOWN_TO_ALL = b"tfscale/known-to-all"
ERROR_IN_A_GRAPH = """Graph execution error:

Detected at node Sum defined at (most recent call last):
  File "train.py", line 3, in <module>

bucket 'sums': rank 1 (worker 1) is gone
\t [[{{node Sum}}]] [Op:__inference_step_1]"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Nothing stays of what these tests set in this process."""
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(atexit, "register", lambda function: function)
    monkeypatch.setattr(shutdown, "_groups", [])
    monkeypatch.setattr(shutdown, "_wider", [])


class Told:
    def __init__(self):
        self.reasons = []

    def give_up(self, reason, linger):
        self.reasons.append(reason)


def test_the_hook_is_set_once_and_tells_all_groups(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append(error))
    groups = [Told(), Told(), Told()]
    shutdown.announce(groups[:1])
    hook = sys.excepthook
    shutdown.announce(groups[1:])
    assert sys.excepthook is hook
    hook(KeyError, KeyError("no such row"), None)
    assert len(printed) == 1
    assert [one.reasons for one in groups] == [["its program failed: KeyError: 'no such row'"]] * 3


def test_what_all_of_a_part_know_is_told_to_those_around_it():
    everybody, part = Told(), Told()
    shutdown.announce([everybody])
    shutdown.announce([part], within=[everybody])
    lost = tf.errors.UnavailableError(None, None, ERROR_IN_A_GRAPH, {KNOWN_TO_ALL: b"1"})
    sys.excepthook(type(lost), lost, None)
    assert part.reasons == []
    assert everybody.reasons == ["its group failed: bucket 'sums': rank 1 (worker 1) is gone"]


def test_with_nobody_to_tell_nothing_happens():
    shutdown.say("nobody hears it")


# ---- how a program ends

PROGRAM = """
import os, sys, threading
from tfscale.strategy.workers import shutdown

class Rank:
    def announce_exit(self, reason, linger):
        print("TOLD", reason, flush=True)

class Group:
    communicators = [Rank()]

    def give_up(self, reason, linger):
        pass

def caught():
    try:
        sys.exit(9)
    except SystemExit:
        pass

def in_a_thread():
    thread = threading.Thread(target=sys.exit, args=(8,))
    thread.start()
    thread.join()

def in_a_child():
    if os.fork() == 0:
        sys.exit(6)
    os.wait()

def quits():
    raise SystemExit(4)

shutdown.announce([Group()])
try:
    {body}
finally:
    print("ENDS")  # and goes on with what was raised
"""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("pass", "its program ended with exit code 0"),
        ("sys.exit()", "its program ended with exit code 0"),
        ("sys.exit(3)", "its program ended with exit code 3"),
        ("sys.exit(True)", "its program ended with exit code 1"),
        ("sys.exit('no disk')", "its program ended with exit code 1: no disk"),
        ("quits()", "its program ended by SystemExit"),
        ("caught()", "its program ended with exit code 0"),
        ("in_a_thread()", "its program ended with exit code 0"),
        ("in_a_child()", "its program ended with exit code 0"),
        ("raise KeyError", None),  # which is told in other words
        ("os._exit(5)", None),
    ],
)
def test_the_others_are_told_once_how_the_program_ends(body, told):
    done = warm.run(["-c", PROGRAM.replace("{body}", body)], seconds=100)
    assert re.findall(r"^TOLD (.*)$", done.stdout, re.MULTILINE) == [told] * bool(told), done.stdout
