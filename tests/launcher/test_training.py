"""``tfscale launch`` with real trainings on two workers of this machine."""

import json
import re
import signal

import pytest

from tests.launcher.launching import Launched, all_end, launch


def weights(launched):
    return {text for text in re.findall(r"weights (\S+)", launched.out)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("raise", 1),
        pytest.param("kill", 128 + signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_who_failed_first_though_all_fail(way, status):
    """Worker 0 fails, too, since worker 1 has: it says so, and is not blamed."""
    code, launched = launch("-n", 2, "fit.py", way)
    assert code == status, launched.said
    assert "tfscale launch: worker 1 on localhost failed first" in launched.err
    assert launched.err.count("failed first") == 1


@pytest.mark.slow
def test_it_goes_on_from_the_backup(tmp_path):
    plain = launch("-n", 2, "fit.py", "epochs=4")[1]
    words = ["kill", f"once={tmp_path / 'once'}", f"backup={tmp_path / 'backup'}", "epochs=4"]
    status, launched = launch("-n", 2, "--restarts", 1, "fit.py", *words)
    assert status == 0, launched.said
    assert "attempt 2 of 2 begins" in launched.err
    assert launched.out.count("epoch 0 ") == 2, "it began again from the start"
    assert weights(launched) == weights(plain) != set()


@pytest.mark.full
def test_fewer_workers_go_on_with_the_same_training(tmp_path):
    plain = launch("-n", 1, "fit.py", "epochs=4")[1]
    words = ["kill", "always", f"backup={tmp_path / 'backup'}", "epochs=4"]
    options = ["--restarts", 3, "--min-workers", 1]
    status, launched = launch("-n", 2, *options, "fit.py", *words)
    assert status == 0, launched.said
    assert "with 1 workers instead of 2" in launched.err
    (found,), (expected,) = weights(launched), weights(plain)
    assert abs(float(found) - float(expected)) < 1e-4


@pytest.mark.slow
def test_a_timeline_that_no_callback_records(tmp_path):
    """The warning comes when fit begins, and again at the end."""
    options = ["--timeline", tmp_path / "timeline.json"]
    status, launched = launch("-n", 1, *options, "fit.py", "epochs=1")
    assert status == 0, launched.said
    assert launched.err.count("this fit records none: give it the callback") == 1
    assert "nothing was written to" in launched.err


def headers(launched):
    return re.findall(r"^\[(\d)\] Epoch 1/2$", launched.out, re.MULTILINE)


@pytest.mark.slow
def test_one_bar_and_its_header_once():
    status, launched = launch("-n", 2, "fit.py", "bars", "epochs=2")
    assert status == 0, launched.said
    assert headers(launched) == ["0", "0"], launched.said
    assert not re.findall(r"^\[1\].*━", launched.out, re.MULTILINE)


@pytest.mark.full
def test_all_bars():
    status, launched = launch("-n", 2, "--all-bars", "fit.py", "bars", "epochs=2")
    assert status == 0, launched.said
    assert sorted(headers(launched)) == ["0", "0", "1", "1"], launched.said


@pytest.mark.full
def test_devices_per_worker_and_a_timeline(tmp_path):
    file = tmp_path / "timeline.json"
    options = ["--devices-per-worker", 2, "--timeline", file]
    status, launched = launch("-n", 2, *options, "fit.py", "telemetry")
    assert status == 0, launched.said
    assert "4 replicas train, on 2 workers, each on its CPU:0, CPU:1" in launched.err
    assert len(weights(launched)) == 1
    assert f"the timelines of 2 workers are in {file}" in launched.err
    assert "records none" not in launched.err
    assert {event["pid"] for event in json.loads(file.read_text())["traceEvents"]} == {0, 1, 2, 3}


def test_no_other_program_gets_a_workers_port():
    """The launcher holds it until the worker has it."""
    status, launched = launch("-n", 2, "starts.py", "taken")
    assert status == 1, launched.said
    assert "tfscale launch: worker 1 on localhost failed first" in launched.err
    assert re.search(r"starts.py.*\n.*squatter = .*create_server", launched.err), launched.said
    assert "Address already in use" in launched.err


@pytest.mark.slow
def test_a_worker_that_hangs_at_the_start():
    """The others give up, and nobody is left."""
    status, launched = launch("-n", 2, "starts.py", "hangs")
    assert status == 1, launched.said
    assert "tfscale launch: worker 0 on localhost failed first" in launched.err
    assert "waited 5 s for worker 1" in launched.err
    assert not all_end(re.findall(r"pid (\d+)", launched.out))


@pytest.mark.slow
def test_preemption_saves_and_ends_well(tmp_path):
    """Send the signal that Slurm's --signal=TERM@60 sends."""
    words = ["fit.py", f"preemption={tmp_path / 'backup'}"]
    with Launched("-n", 2, *words, "epochs=1000") as launched:
        launched.until("epoch 1 ", 2)
        launched.signal(signal.SIGTERM)
        assert launched.end() == 0, launched.said
    assert "failed" not in launched.err
    assert launched.err.count("this worker got SIGTERM: saved at step ") == 2
    reached = max(map(int, re.findall(r"epoch (\d+) ", launched.out)))
    status, launched = launch("-n", 2, *words, f"epochs={reached + 3}")
    assert status == 0, launched.said
    assert min(map(int, re.findall(r"epoch (\d+) ", launched.out))) >= reached


@pytest.mark.full
@pytest.mark.timeout(900)
def test_many_workers():
    status, launched = launch("-n", 32, "fit.py")
    assert status == 0, launched.said
    assert launched.out.count("weights") == 32 and len(weights(launched)) == 1
