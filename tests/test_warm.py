"""Warm processes are processes: their ends, environments and accidents are their own."""

import json
import os
import signal

import pytest

from tests import warm

PATIENCE = 100  # seconds, longer than anything here takes


def test_a_script_runs_as_it_would_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys
print(__name__, sys.argv[1:], os.environ["GIVEN"], os.environ.get("HOME"), os.getcwd())
print(sorted(vars()) == sorted(vars(sys.modules["__main__"])))
print(os.path.dirname(__file__) == sys.path[0])
""")
    environment = {"GIVEN": "yes"}
    with open(tmp_path / "said", "wb") as output:
        process = warm.Process([str(script), "a", "b"], environment, output.fileno(), tmp_path)
    assert process.wait(PATIENCE) == 0
    said = (tmp_path / "said").read_text().splitlines()
    assert said == [f"__main__ ['a', 'b'] yes None {tmp_path}", "True", "True"]


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("print(1)", 0, "1"),
        ("import sys; sys.exit(4)", 4, ""),
        ("import atexit; atexit.register(print, 'bye'); raise KeyError('x')", 1, "bye"),
        ("import sys; sys.excepthook = lambda *_: print('hooked'); 1 / 0", 1, "hooked"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import threading; threading.Thread(target=print, args=['late']).start()", 0, "late"),
    ],
)
def test_they_end_as_any_process_does(code, status, said):
    done = warm.run(["-c", code])
    assert done.returncode == status
    assert said in done.stdout


def test_who_takes_too_long_is_ended(tmp_path):
    code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid()))"
    with pytest.raises(warm.TimeoutExpired):
        warm.run(["-c", f"{code}; time.sleep(600)"], cwd=tmp_path, seconds=3)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


TELL = """
import json, os, random, numpy, tensorflow
print(json.dumps([os.getpid(), hash("a"), random.random(), numpy.random.random(),
                  float(tensorflow.random.uniform([]))]))
"""


def test_workers_differ_in_all_that_processes_differ_in():
    """Workers differ in the order of their sets, too: each parent has an order of its own."""
    with warm.Workers(["-c", TELL], 2) as workers:
        found = [json.loads(output.splitlines()[-1]) for output in workers.wait(PATIENCE)]
    for one, other in zip(*found, strict=True):
        assert one != other


def test_a_worker_can_be_killed_with_all_that_it_started():
    code = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True)"
    with warm.Workers(["-c", f"{code}; p.wait()"], 2) as workers:
        while not all(workers.output(i).strip() for i in range(2)):
            assert all(process.poll() is None for process in workers.processes)
        workers.signal(1, signal.SIGKILL)
        assert workers.processes[1].wait(PATIENCE) == -signal.SIGKILL
        assert workers.processes[0].poll() is None
        assert os.getpgid(workers.processes[0].pid) == workers.processes[0].pid
    assert workers.processes[0].returncode == -signal.SIGKILL
