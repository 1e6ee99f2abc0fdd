"""A short campaign of faults, and what makes one fail. The long one: ``make test-faults N=200``."""

import dataclasses

import pytest

from tests.faults.campaign import (
    DEADLINE,
    GOOD,
    KINDS,
    METHODS,
    MOMENTS,
    PROMPT,
    RULES,
    TRANSPORTS,
    VICTIMS,
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
    "late sums": Fault(
        "kill", "step", 1, 2, "tree", "int4", sync="BoundedStaleness(bound=2)", step=2
    ),
    "shares": Fault("kill", "step", 1, 2, "ring", "int8", step=2, shares="{'worker:1': 0.5}"),
    "measured shares": Fault(
        "kill", "step", 1, 2, "ring", "fp32", sync="BoundedStaleness(bound=2)", shares="'auto'"
    ),
    "stages": Fault("kill", "step", 1, 2, "ring", "fp32", grid="late gradients", step=2),
    "state": Fault("kill", "save", 0, 2, "ring", "int8", grid="state"),
    "exit": Fault("exit", "step", 1, 2, "ring", "TopK(0.25)", transport="tcp"),
}
CI = {"kill", "measured shares", "stages"}


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in CI else pytest.mark.full) for name in SHORT]
)
def test_a_fault_comes_to_a_good_end(name):
    outcome, why = run(SHORT[name])
    assert outcome in GOOD, why


def test_a_campaign_draws_everything_and_the_same_each_time():
    faults = [draw(1, number) for number in range(400)]
    assert {(fault.kind, fault.moment) for fault in faults} == {
        (kind, moment) for kind in KINDS for moment in MOMENTS
    }
    assert {fault.sync for fault in faults} == {"", *RULES}
    assert {fault.transport for fault in faults} == set(TRANSPORTS)
    assert {fault.wire for fault in faults} > set(METHODS)
    assert faults == [draw(1, number) for number in range(400)]
    assert faults != [draw(2, number) for number in range(400)]
    assert all(fault.victim < fault.workers for fault in faults)


# ---- what the judge says of what workers have told, at so many seconds

AT = 1000.0  # when the fault comes
NAMED = "rank 0 (worker 0 at 127.0.0.1:1)"
GONE = f"{NAMED} is gone"
WHY = {
    "raise": "gave up: its program failed: KeyError: 'no such row'",
    "exit": "is gone: its program ended with exit code 3",
    "interrupt": "gave up: its program failed: KeyboardInterrupt: ",
    "term": "gave up: it got SIGTERM",
}
VICTIM = f"HERE {AT - 5}\nAT 0\nFAULT {AT}\n"


def other(*lines):
    return "\n".join([f"HERE {AT - 5}", "AT 0", *lines, ""])


def failed(after=1.0, message=GONE):
    return other(f"ERROR {AT + after} UnavailableError {message}")


def told(others, codes=(-9, 1), ends=(0.1, 2.0), victim=VICTIM, garbage=0):
    return Told([victim, others], list(codes), [AT + end for end in ends], garbage)


@pytest.mark.parametrize(
    ("met", "outcome"),
    [
        (told(failed()), "ended"),
        (told(other("END 12ab"), codes=(-9, 0)), "ended"),
        (told(failed(), codes=(-9, None)), "hung"),
        (told(failed(message=GONE.replace("0 (worker 0", "1 (worker 1"))), "misnamed"),
        (told(other()), "wrong"),
        (told(failed(), codes=(-9, -11)), "crashed"),
        (told(failed(), codes=(-9, 0)), "crashed"),
        (told(failed(), codes=(1, 1)), "crashed"),
        (told(other("END 12ab"), codes=(-9, -6)), "crashed"),
        (told(failed(after=PROMPT + 1), ends=(0.1, PROMPT + 2)), "late"),
        (told(failed(), ends=(0.1, 2 * PROMPT + 1)), "late"),
        (told(failed(), ends=(PROMPT + 1, 2)), "late"),
        (told(other("END 12ab"), codes=(-9, 0), ends=(0.1, PROMPT + 1)), "late"),
    ],
)
def test_survivors_must_soon_name_the_worker_and_end_by_that_error(met, outcome):
    assert judge_end(KILLED, met)[0] == outcome


@pytest.mark.parametrize(
    ("kind", "code", "outcome"),
    [
        ("raise", 1, "ended"),
        ("raise", -6, "crashed"),
        ("exit", 3, "ended"),
        ("exit", 0, "crashed"),
        ("interrupt", -2, "ended"),
        ("term", -15, "ended"),
        ("term", 0, "crashed"),
    ],
)
def test_the_worker_that_meets_the_fault_ends_by_it(kind, code, outcome):
    fault = dataclasses.replace(KILLED, kind=kind)
    met = told(failed(message=f"{NAMED} {WHY[kind]}"), codes=(code, 1))
    assert judge_end(fault, met)[0] == outcome


@pytest.mark.parametrize("kind", sorted(WHY))
def test_the_others_are_told_why(kind):
    fault = dataclasses.replace(KILLED, kind=kind)
    code = VICTIMS[kind]
    met = told(failed(message=f"{NAMED} is gone: it closed the connection"), codes=(code, 1))
    assert judge_end(fault, met)[0] == "misnamed"


def test_who_waits_for_a_stopped_worker_has_the_deadline_and_no_more():
    stopped = dataclasses.replace(KILLED, kind="stop")
    for after, outcome in ((DEADLINE + 1, "ended"), (DEADLINE + PROMPT + 1, "late")):
        met = told(failed(after), ends=(after + 2, after + 1))
        assert judge_end(stopped, met)[0] == outcome


WATCH = "tfscale: worker 1 waited (worker 0 at x: nothing). This process ends now (join_timeout)"


@pytest.mark.parametrize(
    ("met", "outcome"),
    [
        (told(failed(40, "has waited 40 s for worker 0 at x"), ends=(0, 41)), "ended"),
        (told(failed(40, "has waited 40 s for worker 2 at x"), ends=(0, 41)), "misnamed"),
        (told(failed(70, "has waited 70 s for worker 0 at x"), ends=(0, 71)), "late"),
        (told(other(WATCH), codes=(-9, -9), ends=(0, 41)), "ended"),
        (told(other(), codes=(-9, -9), ends=(0, 41)), "wrong"),
        (told(other(WATCH.replace("0 at", "2 at")), codes=(-9, -9), ends=(0, 41)), "wrong"),
    ],
)
def test_a_worker_that_is_lost_while_all_join_is_named_before_there_are_ranks(met, outcome):
    assert judge_end(dataclasses.replace(KILLED, moment="join"), met)[0] == outcome


def test_a_watch_ends_nobody_later():
    assert judge_end(KILLED, told(other(WATCH), codes=(-9, -9), ends=(0, 41)))[0] == "wrong"


def test_a_fault_that_never_came_is_no_success():
    met = told(other("END 12ab"), (0, 0), victim=other("END 12ab"))
    assert judge_end(KILLED, met)[0] == "wrong"


@pytest.mark.parametrize(
    ("second", "codes", "outcome"),
    [
        ("END 12ab\nWHOLE 12ab\n", (0, 0), "survived"),
        ("END 12ab\nWHOLE 12ab\n", (0, -11), "crashed"),
        ("END 12ab\nWHOLE 34cd\n", (0, 0), "wrong"),
        ("END 34cd\nWHOLE 34cd\n", (0, 0), "wrong"),
        (failed(), (0, 1), "wrong"),
    ],
)
@pytest.mark.parametrize("kind", ["pause", "garbage"])
def test_who_survives_ends_as_if_nothing_had_been(kind, second, codes, outcome):
    fault = dataclasses.replace(KILLED, kind=kind)
    met = told(second, codes, victim=f"{VICTIM}END 12ab\nWHOLE 12ab\n", garbage=3)
    assert judge_end(fault, met)[0] == outcome


@pytest.mark.parametrize("came", [True, False])
def test_garbage_that_nobody_was_sent_is_not_survived(came):
    garbage = dataclasses.replace(KILLED, kind="garbage")
    whole = "END 12ab\nWHOLE 12ab\n"
    victim = VICTIM + whole if came else whole
    met = told(whole, (0, 0), victim=victim, garbage=0 if came else 3)
    assert judge_end(garbage, met)[0] == "wrong"


@pytest.mark.parametrize(
    ("second", "codes", "outcome"),
    [
        ("PREEMPTED 56ef", (75, 75), "preempted"),
        ("PREEMPTED 56ef", (75, 0), "crashed"),
        ("PREEMPTED 78ab", (75, 75), "wrong"),
        ("END 12ab", (75, 0), "wrong"),
    ],
)
def test_all_save_the_same_and_leave_with_the_code_for_it(second, codes, outcome):
    fault = dataclasses.replace(KILLED, kind="term")
    met = told(other(second), codes, victim=f"{VICTIM}PREEMPTED 56ef\n")
    assert judge_end(fault, met)[0] == outcome


def again(text, codes=(0, 0)):
    return Told([text, text], list(codes), [AT, AT])


MET = told(other("SAVED 1", f"ERROR {AT} UnavailableError {GONE}"), victim=f"SAVED 1\n{VICTIM}")


@pytest.mark.parametrize(
    ("restarted", "wrong"),
    [
        (again("AT 1\nEND 12ab\nWHOLE 12ab\n"), ""),
        (again("AT 2\nEND 12ab\nWHOLE 12ab\n"), ""),
        (again("AT 1\nEND 34cd\nWHOLE 12ab\n"), "it ended with"),
        (again("AT 0\nEND 12ab\nWHOLE 12ab\n"), "though 1 were saved"),
        (again("AT 1\nERROR 1 ValueError\n", (1, 1)), "it did not end"),
        (again("AT 1\nEND 12ab\nWHOLE 12ab\n", (0, -11)), "it did not end"),
        (again("AT 1\n", (0, None)), "it did not end"),
    ],
)
def test_a_restart_loses_nothing_and_ends_as_if_nothing_had_been(restarted, wrong):
    said = judge_restart(KILLED, MET, restarted)
    assert wrong in said and bool(said) == bool(wrong)


def test_replicas_that_never_become_equal_restart_from_their_mean():
    gossip = dataclasses.replace(KILLED, sync="Gossip(every=1)")
    restarted = again("AT 1\nEND 34cd\nWHOLE 12ab\n")
    assert not judge_restart(gossip, MET, restarted)
    restarted.outputs[1] = "AT 1\nEND 56ef\nWHOLE 12ab\n"
    assert "workers ended with" in judge_restart(gossip, MET, restarted)


def test_trainings_with_measured_shares_need_not_end_with_the_same_bits():
    measured = dataclasses.replace(KILLED, shares="'auto'")
    assert not judge_restart(measured, MET, again("AT 1\nEND 34cd\nWHOLE 12ab\n"))
    paused = dataclasses.replace(measured, kind="pause")
    for end, outcome in (("34cd", "survived"), ("12ab", "wrong")):
        victim = f"{VICTIM}END {end}\nWHOLE 12ab\n"
        met = told("END 34cd\nWHOLE 12ab\n", (0, 0), victim=victim)
        assert judge_end(paused, met)[0] == outcome


LEFT = told(other("PREEMPTED 56ef"), (75, 75), victim=f"{VICTIM}PREEMPTED 56ef\n")


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
    restarted = again(f"AT 1\nSTATE {state}\nEND {end}\nWHOLE 12ab\n")
    said = judge_restart(dataclasses.replace(KILLED, kind="term"), LEFT, restarted)
    assert wrong in said and bool(said) == bool(wrong)
