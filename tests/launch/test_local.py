"""Workers on this machine: each knows its place, none outlives the block, no wait hangs."""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from tfscale.launch import LocalWorkers, WorkerFailed

PATIENCE = 100  # seconds, longer than anything here takes
TELL = "import os; print(os.environ['TF_CONFIG'], os.environ.get('A'), os.environ.get('B'))"


def python(program, count, **settings):
    return LocalWorkers([sys.executable, "-c", program], count, **settings)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it is read
        return False


def test_each_worker_knows_the_cluster_and_its_place():
    with python(TELL, 3) as workers:
        configs = [json.loads(output.rsplit(" ", 2)[0]) for output in workers.wait(PATIENCE)]
    assert [c["task"] for c in configs] == [{"type": "worker", "index": i} for i in range(3)]
    assert configs[0]["cluster"] == configs[2]["cluster"]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_nobody_else_is_given_a_port_before_its_worker_opens_it():
    with python(TELL, 1) as workers, socket.socket() as other:
        config = json.loads(workers.wait(PATIENCE)[0].rsplit(" ", 2)[0])
        host, port = config["cluster"]["worker"][0].split(":")
        with pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))


def test_hosts_prefixes_and_variables():
    with python(
        TELL,
        2,
        hosts=["10.0.0.1", "10.0.0.2"],
        prefixes=[["env", "A=prefix"], []],
        environment={"A": "all", "B": "all"},
        environments=[{}, {"B": "mine"}],
    ) as workers:
        first, second = workers.wait(PATIENCE)
    assert '"10.0.0.1:' in first and '"10.0.0.2:' in first
    assert first.split()[-2:] == ["prefix", "all"]
    assert second.split()[-2:] == ["all", "mine"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_worker_that_fails_is_shown_at_once(failing):
    program = f"""
import os, sys, time
if {TELL_INDEX} == {failing}: sys.exit('oh no')
time.sleep(600)"""
    with python(program, 2) as workers:
        with pytest.raises(WorkerFailed, match=rf"(?s){failing} of 2 exited with 1.*oh no"):
            workers.wait(PATIENCE)
        assert workers.processes[1 - failing].poll() is None  # nobody waited for it


def test_a_worker_that_native_code_killed_names_the_signal_and_a_known_cause():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    with python(program, 1) as workers:
        expected = r"0 of 1 was killed by SIGSEGV, .*TF_ENABLE_ONEDNN_OPTS=0"
        with pytest.raises(WorkerFailed, match=expected):
            workers.wait(PATIENCE)


TELL_INDEX = "__import__('json').loads(os.environ['TF_CONFIG'])['task']['index']"


def test_a_worker_that_does_not_end_is_not_waited_for_forever():
    program = "import time; print('busy', flush=True); time.sleep(600)"
    with python(program, 1) as workers, pytest.raises(WorkerFailed, match="still runs after 1 s"):
        workers.wait(1)


def test_one_may_wait_for_some():
    program = f"import os, time; time.sleep(600 * {TELL_INDEX})"
    with python(program, 2) as workers:
        workers.wait(PATIENCE, only=[0])
        assert workers.processes[1].poll() is None


def test_outputs_can_be_watched_while_workers_run(tmp_path):
    """The worker ends only when what it said has been seen."""
    seen = tmp_path / "seen"
    program = (
        f"import os, time\nprint('here', flush=True)\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    )

    def watch():
        if "here" in workers.output(0):
            seen.touch()

    with python(program, 1) as workers:
        assert workers.wait(PATIENCE, watch=watch) == ["here\n"]


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_outlives_the_block_not_even_children_or_the_stopped(stopped):
    program = (
        "import subprocess, time; "
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    )
    with python(program, 1) as workers:
        end = time.monotonic() + PATIENCE
        while not workers.output(0).strip() and time.monotonic() < end:
            time.sleep(0.05)
        pids = [workers.processes[0].pid, int(workers.output(0))]
        if stopped:
            workers.signal(0, signal.SIGSTOP)
        assert all(map(alive, pids))
    end = time.monotonic() + PATIENCE
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_an_error_in_the_block_ends_the_workers_too():
    with pytest.raises(ZeroDivisionError), python("import time; time.sleep(600)", 1) as workers:
        raise ZeroDivisionError
    assert workers.processes[0].poll() == -signal.SIGKILL


def test_a_command_that_cannot_start_leaves_nothing_behind(monkeypatch):
    """The second of two has a prefix that does not exist."""
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(FileNotFoundError):
        LocalWorkers(["sleep", "600"], 2, prefixes=[[], ["/no/such/program"]])
    (first,) = started
    assert first.poll() == -signal.SIGKILL
