"""Workers that fail in the middle of ``fit``: the others are told who and why.

Long before the deadline: whoever waits for that gets another error.
"""

import re
import time

import pytest
from helpers import PATIENCE

from tests.strategy.groups import start

pytestmark = pytest.mark.timeout(400)
SECONDS = 300


def begin(way, victim, workers=2, deadline=PATIENCE, **more):
    settings = {"WAY": way, "VICTIM": victim, "DEADLINE": deadline, "SLOW_AFTER": 0, **more}
    environment = {name: str(value) for name, value in settings.items()}
    environment["TF_CPP_MIN_LOG_LEVEL"] = "1"  # warnings, too
    return start("fault.py", f"{workers}x1", **environment)


def run(way, victim, workers=2, **settings):
    """Return the output of all workers when the others know of the failure."""
    with begin(way, victim, workers, **settings) as group:
        others = [i for i in range(workers) if i != victim]
        wait_for(group, others, r"^(ERROR .*|DONE)\n")
        return [group.output(i) for i in range(workers)]


def wait_for(group, indices, what):
    end = time.monotonic() + SECONDS
    while not all(re.search(what, group.output(i), re.MULTILINE) for i in indices):
        assert time.monotonic() < end, group.output(indices[0])[-3000:]
        time.sleep(0.05)


def event(output):
    return float(re.search(r"^EVENT (\S+)$", output, re.MULTILINE).group(1))


def error(output):
    """Return the time, the kind and the message of an error."""
    found = re.search(r"^ERROR (\S+) (\w+) (.*)$", output, re.MULTILINE)
    assert found, output[-3000:]
    return float(found[1]), found[2], found[3]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("way", "victim", "workers"),
    [
        ("kill", 1, 3),
        ("kill", 0, 2),
        ("kill while others wait for data", 0, 2),
        ("kill while others make variables", 1, 2),
    ],
)
def test_survivors_name_a_worker_that_was_killed(way, victim, workers, tmp_path):
    outputs = run(way, victim, workers, GO=tmp_path / "go")
    for survivor in set(range(workers)) - {victim}:
        when, kind, message = error(outputs[survivor])
        seconds = when - event(outputs[victim])
        print(f"MEASURED {way} {victim}: worker {survivor} knew after {seconds:.2f} s")
        # Where TensorFlow's own service hears of a death first, it aborts what is under way.
        assert kind in ("UnavailableError", "CancelledError"), message
        assert f"rank {victim} (worker {victim} at 127.0.0.1:" in message
        assert "is gone" in message or "collective ops already aborted" in message
        if "data" in way:
            (batch,) = re.findall(r"^BATCH (\S+)$", outputs[survivor], re.MULTILINE)
            assert event(outputs[victim]) < float(batch) < when


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_a_worker_that_was_killed_with_its_parts_is_named(optimizer):
    """Both where weights are cut into equal parts, and where each has an owner."""
    outputs = run("kill", 1, SHARD="optimizer", OPTIMIZER=optimizer)
    _, _, message = error(outputs[0])
    assert "rank 1 (worker 1 at 127.0.0.1:" in message, message


@pytest.mark.slow
def test_a_worker_that_was_killed_is_named_to_those_too_with_whom_it_does_not_mix():
    """Each of the others names it, though a mixture concerns two: all end a round together."""
    outputs = run("kill", 2, workers=3, SYNC="Gossip(2)")
    for survivor in (0, 1):
        _, _, message = error(outputs[survivor])
        assert "rank 2 (worker 2 at 127.0.0.1:" in message, message


@pytest.mark.slow
def test_a_worker_that_was_killed_while_ways_travel_is_named():
    """The worker dies right after it has begun to send, three steps before anybody takes."""
    outputs = run("kill", 1, workers=3, SYNC="DiLoCo(8, fragments=2, delay=3)")
    for survivor in (0, 2):
        _, _, message = error(outputs[survivor])
        assert "rank 1 (worker 1 at 127.0.0.1:" in message, message


GROUPS = {"workers": 4, "SYNC": "Hierarchical(outer=LocalSGD(every=5), group=2)"}


@pytest.mark.full
def test_a_worker_that_was_killed_in_a_group_is_named_to_the_other_group():
    outputs = run("kill", 1, **GROUPS)
    for survivor in (0, 2, 3):
        _, _, message = error(outputs[survivor])
        assert "(worker 1 at 127.0.0.1:" in message, message


@pytest.mark.full
def test_what_has_failed_in_a_group_is_told_to_the_other_group(tmp_path):
    """The other group comes to the end of its round long after that."""
    go = tmp_path / "go"
    with begin("stop", 1, deadline=20, BUSY="2 3", GO=go, **GROUPS) as group:
        wait_for(group, [0], r"^ERROR .*\n")
        go.touch()
        wait_for(group, [2, 3], r"^ERROR .*\n")
        for survivor in (0, 2, 3):
            _, _, message = error(group.output(survivor))
            assert "waiting for rank 1 (worker 1 at 127.0.0.1:" in message, message
            assert survivor == 0 or "rank 0 (worker 0 at 127.0.0.1:" in message, message


def test_an_exception_between_exchanges_is_told_to_the_others():
    outputs = run("raise", 1)
    when, kind, message = error(outputs[0])
    assert kind == "CancelledError", message
    assert "rank 1 (worker 1 at 127.0.0.1:" in message
    assert "gave up: its program failed: KeyError: 'no such row'" in message
    print(f"MEASURED raise: worker 0 knew after {when - event(outputs[1]):.2f} s")
    assert error(outputs[1])[1:] == ("KeyError", "'no such row'")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("way", "how", "settings"),
    [
        ("exit 3", "its program ended with exit code 3", {}),
        ("exit 3", "its program ended with exit code 3", {"TFSCALE_TRANSPORT": "grpc"}),
        ("exit 0", "its program ended with exit code 0", {"SYNC": "LocalSGD(every=4)"}),
        ("end", "its program ended with exit code 0", {}),
    ],
)
def test_a_worker_that_ends_its_program_is_named_with_its_exit_code(way, how, settings):
    """Before Python has taken the process down, which takes it a while."""
    outputs = run(way, 1, **settings)
    when, kind, message = error(outputs[0])
    print(f"MEASURED {way}: worker 0 knew after {when - event(outputs[1]):.2f} s")
    assert kind == "UnavailableError", message
    assert re.search(rf"rank 1 \(worker 1 at 127.0.0.1:\d+\) is gone: {how}", message), message


def test_a_worker_that_ends_at_once_is_named():
    """End the worker as ``os._exit`` does, without a message."""
    _, kind, message = error(run("end at once", 1)[0])
    # Where TensorFlow's own service hears of it first, it aborts what is under way.
    assert kind in ("UnavailableError", "CancelledError"), message
    assert "rank 1 (worker 1 at 127.0.0.1:" in message


def test_an_exception_in_a_worker_s_data_is_told_to_the_others():
    _, kind, message = error(run("data", 1)[0])
    assert kind == "CancelledError", message
    assert "rank 1 (worker 1 at 127.0.0.1:" in message
    assert "gave up: its program failed: " in message and "no such shard" in message


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["stop", "stop in a step"])
def test_a_worker_that_is_stopped_is_named_after_the_deadline(way):
    """None that waits is named in its stead, in whatever collective it waits."""
    outputs = run(way, 1, workers=3, deadline=20)
    for survivor in (0, 2):
        _, kind, message = error(outputs[survivor])
        assert kind == "DeadlineExceededError", message
        waits = re.findall(r"no progress for (\S+) s, waiting for (.*?)\. A rank", message)
        assert waits, message
        for seconds, whom in waits:
            assert float(seconds) >= 20
            assert re.findall(r"rank (\d)", whom) == ["1"], message


def test_a_worker_that_is_slow_is_named_in_a_warning_and_waited_for(tmp_path):
    """The worker goes on when the other has warned; each exchange that waits warns once."""
    go = tmp_path / "go"
    with begin("slow", 1, SLOW_AFTER=3, GO=go) as group:
        wait_for(group, [0], r"(?s)^REACHED.* has waited ")
        go.touch()
        wait_for(group, [0], r"^(ERROR .*|DONE)\n")
        _, said = group.output(0).split("\nREACHED")
    assert "\nDONE" in said, said[-3000:]
    late = re.findall(r"tfscale: bucket '(.*?)' has waited \S+ s for (.*): no sign", said)
    assert re.fullmatch(r"rank 1 \(worker 1 at 127.0.0.1:\d+\)", late[0][1])
    for bucket in {name for name, _ in late}:
        told = re.findall(rf"bucket '{re.escape(bucket)}' (has waited|is done after all)", said)
        assert told == ["has waited", "is done after all"] * (len(told) // 2)
