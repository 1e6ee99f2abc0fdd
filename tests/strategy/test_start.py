"""Workers that are started wrongly, as trainings: nobody waits in silence, all hear why."""

import json
import re
import signal
import time

import pytest
from helpers import PATIENCE

from tests import warm
from tests.strategy.groups import WORKERS, start

pytestmark = pytest.mark.timeout(400)
SECONDS = 300


def begin(way, workers=2, deadline=PATIENCE, join_timeout=PATIENCE, go=""):
    settings = {"WAY": way, "DEADLINE": deadline, "JOIN_TIMEOUT": join_timeout, "GO": go}
    return start("start.py", f"{workers}x1", **{name: str(x) for name, x in settings.items()})


def wait_for(group, index, what):
    end = time.monotonic() + SECONDS
    while True:
        over = group.processes[index].poll() is not None or time.monotonic() > end
        found = re.search(what, group.output(index), re.MULTILINE)
        if found:
            return found
        assert not over, group.output(index)[-3000:]
        time.sleep(0.05)


def test_a_program_that_starts_tensorflow_first_hears_by_which_line():
    with begin("make a tensor first") as group:
        for index in (0, 1):
            error = wait_for(group, index, r"^ERROR RuntimeError (.*)")[1]
            assert re.search(
                r"TensorFlow was started by \S+start\.py, line \d+: tf\.constant\(1\), before .* "
                r"move `strategy = tfscale\.ScaleStrategy\(\.\.\.\)` to the top of the program",
                error,
            )


def test_a_worker_that_does_not_come_is_named():
    with begin("never come", join_timeout=3) as group:
        error = wait_for(group, 0, r"^ERROR JoinError (.*)")[1]
    assert re.search(r"worker 0 at \S+ has waited 3 s for worker 1 at 127\.0\.0\.1:\d+ \(", error)
    assert "its TF_CONFIG has the same list" in error


def test_a_worker_that_ends_between_the_meeting_and_tensorflow_is_named():
    """TensorFlow waits then, without an end, and does not let Python run."""
    with begin("leave after the meeting", join_timeout=30) as group:
        assert group.processes[0].wait(SECONDS) == -signal.SIGKILL
        said = group.output(0)
    assert re.search(
        r"tfscale: worker 0 at \S+ has met all others and waited \d+ s for their servers "
        r"\(worker 1 at 127\.0\.0\.1:\d+: nothing listens there\). This process ends now",
        said,
    ), said[-3000:]


def test_a_worker_that_stops_before_it_joins_is_named():
    with begin("stop before joining", deadline=8) as group:
        error = wait_for(group, 0, r"^ERROR DeadlineExceededError (.*)")[1]
    assert re.search(r"No answer from rank 1 \(worker 1 at 127.0.0.1:\d+\): stopped", error)


def test_a_duplicate_that_comes_later_ends_and_the_training_goes_on(tmp_path):
    go = tmp_path / "go"
    with begin("", go=go) as group:
        wait_for(group, 1, "^STEP")
        own = json.loads(wait_for(group, 1, "^ENVIRONMENT (.*)")[1])
        duplicate = warm.run(
            [str(WORKERS / "start.py")], environment={**own, "JOIN_TIMEOUT": "3"}, seconds=SECONDS
        )
        go.touch()
        for index in (0, 1):
            wait_for(group, index, "^DONE with 2 replicas")
    error = re.search("^ERROR JoinError (.*)", duplicate.stdout, re.MULTILINE)[1]
    assert "its port cannot be opened: another program has it" in error
    assert "or a training that already runs" in error


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGTERM, "gave up: it got SIGTERM"),
        (signal.SIGINT, "gave up: (its program failed: KeyboardInterrupt|it was interrupted)"),
    ],
)
def test_a_worker_that_is_told_to_end_ends_and_the_others_hear_why(number, said):
    with begin("") as group:
        for index in (0, 1):
            wait_for(group, index, "^STEP")
        group.signal(1, number)
        assert group.processes[1].wait(PATIENCE) == -number
        error = wait_for(group, 0, r"^ERROR CancelledError (.*)")[1]
    assert re.search(rf"rank 1 \(worker 1 at 127.0.0.1:\d+\) {said}", error)


def test_a_signal_that_tensorflow_took_while_its_servers_started_is_not_lost():
    with begin("get SIGTERM while servers start") as group:
        assert group.processes[1].wait(PATIENCE) == -signal.SIGTERM
        error = wait_for(group, 0, r"^ERROR CancelledError (.*)")[1]
    assert re.search(r"rank 1 \(worker 1 at 127.0.0.1:\d+\) gave up: it got SIGTERM", error)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_waits_for_another_can_be_told_to_end(number):
    """Worker 0 waits in a collective: its main thread hears no signal, yet it ends soon."""
    with begin("", workers=3) as group:
        wait_for(group, 2, "^STEP")
        group.signal(1, signal.SIGSTOP)
        time.sleep(1)  # the others run into it
        group.signal(0, number)
        assert group.processes[0].wait(PATIENCE / 2) == -number, group.output(0)[-3000:]
        error = wait_for(group, 2, r"^ERROR CancelledError (.*)")[1]
    assert re.search(r"rank 0 \(worker 0 at 127.0.0.1:\d+\) gave up: it (got|was)", error)
