"""The ops across real processes."""

import contextlib
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from helpers import PATIENCE

from tests import warm

pytestmark = pytest.mark.timeout(400)

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # for all workers, most of them to start TensorFlow on a busy machine


@contextlib.contextmanager
def start(script, count, each=None, **environment):
    """Workers whose RANK is known before they start TensorFlow, and who leave together.

    ``each``: more variables, by rank.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    variables |= {name: str(value) for name, value in environment.items()}
    with (
        tempfile.TemporaryDirectory() as meeting,
        warm.Workers(
            [str(WORKERS / script)],
            count,
            environment={**variables, "MEETING": meeting},
            environments=[
                {"RANK": str(rank), **(each[rank] if each else {})} for rank in range(count)
            ],
        ) as workers,
    ):
        yield workers


def until(condition, workers):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, workers.output(0)[-3000:]
        time.sleep(0.05)


def digests(outputs):
    return {re.search(r"^DIGEST (\w+)$", output, re.MULTILINE).group(1) for output in outputs}


# What the workers' environment says of transports.
OVER = {
    "shared memory": {"TFSCALE_TRANSPORT": "sockets"},
    "TCP": {"TFSCALE_TRANSPORT": "sockets", "TFSCALE_SHARED_MEMORY": 0},
    "3 TCP connections": {
        "TFSCALE_TRANSPORT": "sockets",
        "TFSCALE_SHARED_MEMORY": 0,
        "TFSCALE_STREAMS": 3,
    },
    "gRPC": {"TFSCALE_TRANSPORT": "grpc"},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("workers", "devices", "over"),
    [
        (2, 1, "3 TCP connections"),
        pytest.param(3, 1, "shared memory", marks=pytest.mark.full),
        (4, 1, "gRPC"),
        (2, 2, "shared memory"),
        pytest.param(4, 1, "TCP", marks=pytest.mark.full),
        pytest.param(4, 1, "shared memory", marks=pytest.mark.full),
        pytest.param(2, 2, "TCP", marks=pytest.mark.full),
        pytest.param(2, 2, "gRPC", marks=pytest.mark.full),
    ],
)
def test_everything_agrees(workers, devices, over, record_property):
    """Each worker checks its own results; all must have the same bits."""
    with start("check.py", workers, DEVICES=devices, **OVER[over]) as started:
        outputs = started.wait(SECONDS)
    assert len(digests(outputs)) == 1
    assert all(f"WAYS ['{over}']" in output for output in outputs), outputs[0][-500:]
    for line in re.findall(r"MEASURED.*", outputs[0]):
        record_property("measured", line)
        print(line)


@pytest.mark.full
def test_all_transports_give_the_same_bits():
    found = {}
    for over, environment in OVER.items():
        with start("check.py", 3, DEVICES=1, **environment) as started:
            (found[over],) = digests(started.wait(SECONDS))
    assert len(set(found.values())) == 1, found


def story(output):
    """Return when, at what step and how a worker's loop ended."""
    found = re.search(r"^ERROR (\S+) step (\d+) (\w+) (.*)$", output, re.MULTILINE)
    assert found, output[-3000:]
    when, number, kind, message = found.groups()
    return float(when), int(number), kind, message


def event(output):
    return float(re.search(r"^EVENT (\S+)$", output, re.MULTILINE).group(1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("way", "victim", "over"),
    [
        ("kill", 0, "shared memory"),
        ("kill", 2, "3 TCP connections"),
        ("kill", 2, "gRPC"),
        ("kill among routes", 1, "shared memory"),
        ("kill beside a child", 1, "TCP"),
        pytest.param("kill beside a child", 0, "shared memory", marks=pytest.mark.full),
        ("stop", 2, "shared memory"),
        ("stop", 0, "TCP"),
        ("error", 1, "shared memory"),
        pytest.param("stop", 1, "gRPC", marks=pytest.mark.full),
        pytest.param("error", 2, "TCP", marks=pytest.mark.full),
        pytest.param("error", 0, "gRPC", marks=pytest.mark.full),
    ],
)
def test_survivors_are_told_who_failed_and_end_by_themselves(way, victim, over):
    survivors = [rank for rank in range(3) if rank != victim]
    deadline = 10 if way == "stop" else PATIENCE
    kind = {
        "kill": "UnavailableError",
        "stop": "DeadlineExceededError",
        "error": "CancelledError",
    }[way.split()[0]]
    told = {"WAY": way, "VICTIM": victim, "DEADLINE": deadline}
    with start("fail.py", 3, **told, **OVER[over]) as started:
        outputs = started.wait(SECONDS, only=survivors)
        if way.startswith("kill"):
            assert started.processes[victim].wait(SECONDS) == -signal.SIGKILL
    for rank in survivors:
        when, number, found, message = story(outputs[rank])
        seconds = when - event(outputs[victim])
        told = f"rank {rank} knew after {seconds:.2f} s: {message}"
        print(f"MEASURED over {over}: {way} of rank {victim}: {told}")
        assert found == kind, message
        assert f"rank {victim} (worker {victim} at 127.0.0.1:" in message
        assert re.search(r"bucket '(gradients|more|tokens|activation)'", message)
        assert number >= 6
        if way == "stop":
            (waited,) = re.findall(r"no progress for (\S+) s", message)
            assert float(waited) >= deadline


def test_a_worker_that_never_joins():
    with start("fail.py", 2, WAY="absent", VICTIM=1, DEADLINE=3) as started:
        outputs = started.wait(SECONDS, only=[0])
    _, number, kind, message = story(outputs[0])
    assert (number, kind) == (1, "DeadlineExceededError"), message
    assert "rank 0 (worker 0 at 127.0.0.1:" in message
    assert "not all 2 ranks came together within 3 s" in message


def test_a_stopped_worker_is_waited_for_and_may_come_back():
    """SIGSTOP for less than the deadline harms nobody."""
    with start("fail.py", 2, WAY="stop", VICTIM=1, DEADLINE=PATIENCE) as started:
        stopped = psutil.Process(started.processes[1].pid)
        until(lambda: stopped.status() == psutil.STATUS_STOPPED, started)
        time.sleep(1.5)
        started.signal(1, signal.SIGCONT)
        until(lambda: "BACK" in started.output(1), started)
        assert all(process.poll() is None for process in started.processes), started.output(0)
        assert "ERROR" not in started.output(0) + started.output(1)


@pytest.mark.parametrize("failing", [0, 1])  # before the group has ever come together, and later
def test_a_step_that_fails_between_collectives_ends_on_all_and_then_life_goes_on(failing):
    with start("give_up.py", 3, VICTIM=1, FAILING=failing) as started:
        outputs = started.wait(SECONDS)
    for rank, output in enumerate(outputs):
        assert "TOTALS 0.0 3.0 6.0" in output
        if rank == 1:
            assert "ERROR" not in output
            continue
        when, number, kind, message = story(output)
        seconds = when - event(outputs[1])
        print(f"MEASURED give_up of rank 1: rank {rank} knew after {seconds:.2f} s: {message}")
        assert (number, kind) == (failing, "CancelledError")
        assert re.search(
            r"rank 1 \(worker 1 at 127.0.0.1:\d+\) gave up: ValueError: no more data", message
        )


@pytest.mark.parametrize("slow_after", [3, 0])
def test_a_late_worker_is_named_by_those_who_wait_unless_switched_off(slow_after, tmp_path):
    """The late worker comes when all others have printed their messages."""
    go = tmp_path / "go"
    late = {"VICTIM": 2, "SLOW_AFTER": slow_after, "GO": go, "TF_CPP_MIN_LOG_LEVEL": 0}

    def watch():
        if slow_after == 0 or all("tfscale: bucket" in started.output(rank) for rank in (0, 1)):
            go.touch()

    with start("late.py", 3, **late) as started:
        outputs = started.wait(SECONDS, watch=watch)
    warning = r"tfscale: bucket 'gradients' has waited \S+ s for (.*): no sign of life there yet"
    for rank, output in enumerate(outputs):
        waited = re.findall(warning, output)
        again = re.findall(r"tfscale: bucket 'gradients' is done after all, after (\S+) s", output)
        if rank == 2 or slow_after == 0:
            assert not waited and not again
            continue
        assert len(waited) == len(again) == 1  # all are next to each other in a ring of three
        assert re.fullmatch(r"rank 2 \(worker 2 at 127.0.0.1:\d+\)", waited[0])
