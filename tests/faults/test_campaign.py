"""A short campaign of faults, and what makes one fail. The long one: ``make test-faults N=200``."""

import dataclasses

import pytest

from tests.faults.campaign import (
    GOOD,
    KINDS,
    MOMENTS,
    Fault,
    Told,
    draw,
    judge_end,
    judge_restart,
    run,
)

KILLED = Fault("kill", "save", victim=0, workers=2, schedule="ring", wire="ternary", double=True)
SHORT = {
    "kill": KILLED,
    "pause": Fault("pause", "validation", 1, 2, schedule="halving", wire="int8", pause=1),
    "garbage": Fault("garbage", "step", 0, 2, schedule="tree", wire="fp32"),
}


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", SHORT)
def test_a_fault_comes_to_a_good_end(name):
    outcome, why = run(SHORT[name])
    assert outcome in GOOD, why


def test_a_campaign_draws_everything_and_the_same_each_time():
    faults = [draw(1, number) for number in range(200)]
    assert {(fault.kind, fault.moment) for fault in faults} == {
        (kind, moment) for kind in KINDS for moment in MOMENTS
    }
    assert faults == [draw(1, number) for number in range(200)]
    assert faults != [draw(2, number) for number in range(200)]
    assert all(fault.victim < fault.workers for fault in faults)


# ---- what the judge says of what workers have told

GONE = "ERROR UnavailableError rank 0 (worker 0 at 127.0.0.1:1) is gone"


@pytest.mark.parametrize(
    ("others", "hung", "outcome"),
    [
        (f"AT 0\n{GONE}\n", False, "ended"),
        (f"AT 0\n{GONE}\n", True, "hung"),
        ("AT 0\nERROR UnavailableError rank 1 (worker 1 at 127.0.0.1:2) is gone\n", False,
         "misnamed"),
        ("AT 0\n", False, "wrong"),
        ("AT 0\nEND 12ab\n", False, "ended"),
    ],
)  # fmt: skip
def test_survivors_must_name_the_worker(others, hung, outcome):
    told = Told(["AT 0\nFAULT\n", others], hung)
    assert judge_end(KILLED, told)[0] == outcome


def test_a_fault_that_never_came_is_no_success():
    told = Told(["AT 0\nEND 12ab\n", "AT 0\nEND 12ab\n"])
    assert judge_end(KILLED, told)[0] == "wrong"


@pytest.mark.parametrize(
    ("second", "outcome"),
    [
        ("END 12ab\nWHOLE 12ab\n", "survived"),
        ("END 12ab\nWHOLE 34cd\n", "wrong"),
        ("END 34cd\nWHOLE 34cd\n", "wrong"),
        (GONE, "wrong"),
    ],
)
def test_who_survives_ends_as_if_nothing_had_been(second, outcome):
    paused = dataclasses.replace(KILLED, kind="pause")
    told = Told(["FAULT\nEND 12ab\nWHOLE 12ab\n", second])
    assert judge_end(paused, told)[0] == outcome


MET = Told(["AT 0\nSAVED 1\nFAULT\n", f"AT 0\nSAVED 1\n{GONE}\n"])


@pytest.mark.parametrize(
    ("again", "hung", "wrong"),
    [
        ("AT 1\nEND 12ab\nWHOLE 12ab\n", False, ""),
        ("AT 2\nEND 12ab\nWHOLE 12ab\n", False, ""),
        ("AT 1\nEND 34cd\nWHOLE 12ab\n", False, "it ended with"),
        ("AT 0\nEND 12ab\nWHOLE 12ab\n", False, "though 1 were saved"),
        ("AT 1\nERROR ValueError\n", False, "it did not end"),
        ("AT 1\n", True, "it did not end"),
    ],
)
def test_a_restart_loses_nothing_and_ends_as_if_nothing_had_been(again, hung, wrong):
    said = judge_restart(MET, Told([again, again], hung))
    assert wrong in said and bool(said) == bool(wrong)


LEFT = Told(["AT 0\nFAULT\nPREEMPTED 56ef\n", "AT 0\nPREEMPTED 56ef\n"])


@pytest.mark.parametrize(
    ("state", "end", "wrong"),
    [
        ("3 56ef", "12ab", ""),
        ("3 56ef", "34cd", "it ended with"),
        ("2 56ef", "34cd", ""),  # in the middle of an epoch, which begins again
        ("2 78ab", "34cd", "was saved"),
    ],
)
def test_a_restart_begins_with_what_was_saved(state, end, wrong):
    again = f"AT 1\nSTATE {state}\nEND {end}\nWHOLE 12ab\n"
    said = judge_restart(LEFT, Told([again, again]))
    assert wrong in said and bool(said) == bool(wrong)
