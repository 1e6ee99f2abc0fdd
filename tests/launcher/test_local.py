"""``tfscale launch`` on this machine: real processes, which fail in every way."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.launcher.launching import PROGRAMS, ROOT, Launched, all_end, launch, runs

PROCESS = r"process (\d+)"


def lines(launched):
    return sorted(launched.out.splitlines())


def test_workers_know_each_other():
    status, launched = launch("-n", 3, "says.py", "environment=TF_CONFIG")
    assert status == 0, launched.said
    found = re.findall(r"\[(\d)\] environment TF_CONFIG (.*)", launched.out)
    clusters = {text.partition('"task"')[0] for _, text in found}
    assert len(found) == 3 and len(clusters) == 1
    assert len(set(re.findall(r"127\.0\.0\.1:\d+", clusters.pop()))) == 3
    assert all(f'"index": {rank}' in text for rank, text in found)


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node=2", "says.py"],
        ["--nproc_per_node", "2", "--standalone", "--nnodes=1", "says.py"],  # torchrun's
        ["-np", "2", "says.py"],
        ["-np", "2", "-H", "localhost:4", "python3", "says.py"],  # horovodrun's
        ["-n", "2", "-m", "says"],
    ],
)
def test_what_users_of_other_launchers_type(words):
    status, launched = launch(*words, "print=here")
    assert status == 0, launched.said
    assert lines(launched) == ["[0] here", "[1] here"]


def test_workers_know_their_numbers_as_under_torchrun():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    _, launched = launch("-n", 2, "says.py", *(f"environment={name}" for name in names))
    for rank in (0, 1):
        found = re.findall(rf"\[{rank}\] environment (\w+) (\d+)", launched.out)
        assert dict(found) == dict(zip(names, [str(rank), "2", str(rank), "2"], strict=True))


def test_files_beside_the_program_that_are_named_as_pythons(tmp_path):
    for name in ("json", "argparse", "asyncio", "shlex", "subprocess"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the file of the user')")
    (tmp_path / "train.py").write_text("print('trains')")
    status, launched = launch("-n", 1, "train.py", folder=tmp_path)
    assert status == 0, launched.said
    assert lines(launched) == ["[0] trains"]


def test_threads_are_shared_out_and_the_users_word_counts():
    cores = len(os.sched_getaffinity(0))
    _, launched = launch("-n", 2, "says.py", "0:environment=TF_NUM_INTRAOP_THREADS")
    assert f"TF_NUM_INTRAOP_THREADS {max(1, cores // 2)}" in launched.out
    words = ("-n", 2, "says.py", "0:environment=TF_NUM_INTRAOP_THREADS")
    _, launched = launch(*words, TF_NUM_INTRAOP_THREADS="7")
    assert "TF_NUM_INTRAOP_THREADS 7" in launched.out


def test_each_worker_has_cores_of_its_own():
    cores = sorted(os.sched_getaffinity(0))
    _, launched = launch("-n", 2, "--bind", "says.py", "cores")
    found = [set(map(int, re.findall(r"\d+", text))) for text in
             re.findall(r"cores \[(.*)\]", launched.out)]  # fmt: skip
    assert len(found) == 2 and set.union(*found) <= set(cores)
    assert len(cores) < 2 or not set.intersection(*found)


# ------------------------------------------------------------------------ failures


def test_the_one_that_failed_first_is_shown_once_and_gives_the_status():
    status, launched = launch("-n", 3, "says.py", "print=works", "0.2", "1:error=bad", "1:exit=3",
                              "1")  # fmt: skip
    assert status == 3
    (story,) = re.findall(r"tfscale launch: (worker .*)", launched.err)
    assert re.fullmatch(
        r"worker 1 on localhost failed first, \S+ s after its start: it exited with 3\. "
        r"Its last lines:", story
    )  # fmt: skip
    assert launched.err.count("    bad\n") == 1
    assert launched.err.index("[1] bad") < launched.err.index(story)


def test_a_signal_is_told_by_name():
    status, launched = launch("-n", 2, "says.py", "0.2", "1:kill=SIGKILL", "wait")
    assert status == 128 + signal.SIGKILL
    assert "worker 1 on localhost failed first" in launched.err
    assert "it was killed by SIGKILL, as the kernel does when memory is short" in launched.err


def test_all_end_when_one_fails_even_those_that_do_not_hear():
    status, launched = launch("-n", 2, "--grace", "0.5", "says.py", "child", "pid", "0:deaf", "0.3",
                              "1:exit=4", "wait")  # fmt: skip
    assert status == 4
    processes = re.findall(PROCESS, launched.out)
    assert len(processes) == 4
    assert not [each for each in processes if runs(each)]


def test_nothing_is_left_when_the_launcher_is_killed():
    with Launched("-n", 2, "--grace", 1, "says.py", "child", "pid", "0:deaf", "wait") as launched:
        launched.until("waits", 2)
        processes = re.findall(PROCESS, launched.out)
        assert len(processes) == 4
        launched.signal(signal.SIGKILL)
        launched.end()
        assert all_end(processes) == []


def supervisor_of(launched):
    found = subprocess.run(
        ["pgrep", "-P", str(launched.process.pid)], capture_output=True, text=True, check=True
    )
    (supervisor,) = found.stdout.split()
    return int(supervisor)


def test_nothing_is_left_when_the_supervisor_is_killed():
    with Launched("-n", 2, "says.py", "child", "pid", "wait") as launched:
        launched.until("waits", 2)
        processes = re.findall(PROCESS, launched.out)
        assert len(processes) == 4
        os.kill(supervisor_of(launched), signal.SIGKILL)
        assert launched.end() == 255
        assert "its host was lost: localhost: its connection was cut" in launched.err
        assert all_end(processes) == []


def test_sigterm_twice_ends_all_though_the_supervisor_is_stopped():
    with Launched("-n", 2, "--grace", 1, "says.py", "child", "pid", "0:deaf", "wait") as launched:
        launched.until("waits", 2)
        processes = re.findall(PROCESS, launched.out)
        assert len(processes) == 4
        os.kill(supervisor_of(launched), signal.SIGSTOP)
        for _ in range(2):
            launched.signal(signal.SIGTERM)
            time.sleep(0.5)
        assert launched.end() in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
        assert all_end(processes) == []


def test_nothing_is_left_when_the_supervisor_is_stopped_and_the_launcher_killed():
    with Launched("-n", 2, "--grace", 1, "says.py", "child", "pid", "0:deaf", "wait") as launched:
        launched.until("waits", 2)
        processes = [*re.findall(PROCESS, launched.out), str(supervisor_of(launched))]
        os.kill(supervisor_of(launched), signal.SIGSTOP)
        launched.signal(signal.SIGTERM)
        launched.signal(signal.SIGKILL)
        launched.end()
        assert all_end(processes) == []


@pytest.mark.full  # it waits until nothing but force helps
def test_a_supervisor_that_stays_stopped_is_ended_with_its_workers():
    with Launched("-n", 2, "--grace", 0.5, "says.py", "child", "pid", "wait") as launched:
        launched.until("waits", 2)
        processes = re.findall(PROCESS, launched.out)
        supervisor = supervisor_of(launched)
        launched.signal(signal.SIGTERM)
        time.sleep(0.5)  # two that come at once count as one
        launched.signal(signal.SIGTERM)
        while launched.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGSTOP)
            time.sleep(0.001)
        assert launched.end() == 255
        assert all_end(processes) == []


def test_a_script_that_is_missing(tmp_path):
    status, launched = launch("-n", 2, "nowhere.py", folder=tmp_path)
    assert status == 2
    assert f"error: there is no nowhere.py in {tmp_path}" in launched.err


def test_a_module_that_is_missing():
    status, launched = launch("-n", 2, "-m", "no_such_module")
    assert status == 1
    assert "No module named no_such_module" in launched.err


def test_a_disk_that_is_full_ends_no_training(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may make a small disk")
    try:
        text = "x" * 500
        words = [f"print={text}"] * 100
        status, launched = launch("-n", 2, "--log-dir", folder, "says.py", *words, "0.2", "pid")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert status == 0, launched.err
    assert launched.out.count(text) == 200 and len(re.findall(PROCESS, launched.out)) == 2
    (told,) = re.findall(r"tfscale launch: (.*)", launched.err)
    assert "attempt-0 cannot be written (No space left on device): training goes on" in told


def test_logs_keep_what_each_worker_prints(tmp_path):
    words = ["says.py", "print=all", "1:print=one", "1:error=wrong", "0.2", "1:exit=1", "1"]
    launch("-n", 2, "--log-dir", tmp_path / "logs", "--restarts", 1, *words)
    for attempt in (0, 1):
        kept = tmp_path / "logs" / f"attempt-{attempt}"
        assert (kept / "worker-0.log").read_text() == "all\n"
        assert sorted((kept / "worker-1.log").read_text().split()) == ["all", "one", "wrong"]


def test_logs_of_an_earlier_launch_stay(tmp_path):
    for text in ("first", "second"):
        launch("-n", 1, "--log-dir", tmp_path, "says.py", f"print={text}")
    first, empty, began, second = (
        (tmp_path / "attempt-0" / "worker-0.log").read_text().split("\n")[:4]
    )
    assert (first, empty, second) == ("first", "", "second")
    assert began.startswith("--- tfscale launch began again: 20")


@pytest.mark.parametrize("then", ["wait", "forever"], ids=["silent", "talkative"])
def test_output_that_nobody_reads_any_more(then):
    """Close the output as ``tfscale launch ... | head -2`` does, before more is printed or not."""
    script = f"{sys.executable} -m tfscale launch -n 2 says.py pid {then} | head -2"
    ran = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"], cwd=PROGRAMS, capture_output=True, text=True,
        timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 141
    assert "Traceback" not in ran.stderr
    assert all_end(re.findall(PROCESS, ran.stdout)) == []


def test_a_reader_that_is_slow_gets_all():
    """The reader gets all lines, also the last ones before the end, as with a pager."""
    script = f"{sys.executable} -m tfscale launch -n 1 says.py lines=40000 | (sleep 4; wc -l)"
    ran = subprocess.run(
        ["bash", "-c", script], cwd=PROGRAMS, capture_output=True, text=True, timeout=60,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.stdout.strip() == "40000", ran.stderr


def test_interrupted_though_nobody_reads():
    """The terminal is stopped, or the pager waits: the launcher still hears."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tfscale", "launch", "-n", "2", "says.py", "forever"],
        cwd=PROGRAMS, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout.read(1)
        time.sleep(2)  # by now all pipes are full
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()


def test_the_program_of_a_shell_script_may_save(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} -u {PROGRAMS / 'says.py'} saves wait\n")
    script.chmod(0o755)
    with Launched("-n", 2, script) as launched:
        launched.until("waits", 2)
        launched.signal(signal.SIGTERM)
        launched.end()
        assert launched.out.count("saved") == 2, launched.said


def test_characters_that_the_output_has_not():
    status, launched = launch("-n", 1, "says.py", "bytes=\u2501", PYTHONIOENCODING="ascii")
    assert status == 0, launched.said
    assert "?" in launched.out


def test_orphans_do_not_stay_as_zombies():
    status, launched = launch("-n", 1, "says.py", "zombies")
    assert status == 0, launched.said
    assert "zombies 0" in launched.out


def test_a_signal_without_a_name():
    status, launched = launch("-n", 1, "says.py", "kill=40")
    assert status == 168
    assert "it was killed by signal 40" in launched.err


# ------------------------------------------------------------------------- signals


def test_signals_are_passed_on():
    with Launched("-n", 2, "says.py", "handle", "wait") as launched:
        launched.until("waits", 2)
        launched.signal(signal.SIGUSR1)
        launched.until("heard SIGUSR1", 2)
        launched.signal(signal.SIGTERM)
        assert launched.end() == 0, launched.said
        assert launched.out.count("heard SIGTERM") == 2


def test_sigterm_ends_workers_that_do_not_handle_it_and_starts_no_others():
    with Launched("-n", 2, "--restarts", 3, "says.py", "wait") as launched:
        launched.until("waits", 2)
        launched.signal(signal.SIGTERM)
        assert launched.end() == 128 + signal.SIGTERM
        assert "ended by SIGTERM, which was passed on" in launched.err
        assert "attempt" not in launched.err


def test_sigterm_twice_ends_those_that_do_not_hear():
    with Launched("-n", 2, "--grace", 1, "says.py", "deaf", "pid", "wait") as launched:
        launched.until("waits", 2)
        launched.signal(signal.SIGTERM)
        time.sleep(0.5)
        launched.signal(signal.SIGTERM)
        assert launched.end() == 128 + signal.SIGKILL
        assert all_end(re.findall(PROCESS, launched.out)) == []


def test_interrupted_once_workers_hear_it():
    with Launched("-n", 2, "--restarts", 3, "says.py", "wait") as launched:
        launched.until("waits", 2)
        launched.signal(signal.SIGINT)
        assert launched.end() == 130
        assert launched.err.count("KeyboardInterrupt") == 2


def test_interrupted_twice_it_ends_at_once():
    words = ("-n", 2, "--grace", 1000, "says.py", "pid", "unheard", "wait")
    with Launched(*words) as launched:
        launched.until("waits", 2)
        processes = re.findall(PROCESS, launched.out)
        launched.signal(signal.SIGINT)
        launched.until("Ctrl-C again ends them now")
        launched.signal(signal.SIGINT)
        assert launched.end() == 130
        assert all_end(processes) == []


# ------------------------------------------------------------------------ restarts


def test_it_starts_again(tmp_path):
    words = ["says.py", f"once={tmp_path / 'first'}", "0.1", "0:exit=3", "wait"]
    status, launched = launch("-n", 2, "--restarts", 2, *words)
    assert status == 0, launched.said
    assert "worker 0 on localhost failed first" in launched.err
    assert "attempt 2 of 3 begins in 1 s. It continues from the last backup" in launched.err


def test_it_gives_up_after_so_many_attempts():
    status, launched = launch("-n", 2, "--restarts", 1, "says.py", "0.1", "1:exit=5", "wait")
    assert status == 5
    assert launched.err.count("failed first") == 2


def test_a_worker_that_fails_twice_is_left_out():
    words = ["says.py", "print=begins", "0.1", "2:exit=3", "1:0.5"]
    status, launched = launch("-n", 3, "--restarts", 2, "--min-workers", 2, *words)
    assert status == 0, launched.said
    assert launched.out.count("begins") == 3 + 3 + 2
    assert "with 2 workers instead of 3: the global batch and the steps of an epoch stay" in (
        launched.err
    )
