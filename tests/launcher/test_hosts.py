"""``tfscale launch --hosts``: several hosts, a real ssh, and all that goes wrong with it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.launcher.launching import ROOT, Launched, all_end, launch, runs

PROCESS = r"process (\d+)"


@pytest.fixture
def over(hosts):
    """``over("1:2,2", ...)``: words for two workers on the second host, and one on the third."""

    def words(which, *more, ssh=None):
        listed = ",".join(
            hosts.names[int(word[0])] + word[1:] for word in which.split(",")
        )  # fmt: skip
        return ["--hosts", listed, "--ssh", ssh or hosts.ssh, *more]

    return words


def test_workers_of_two_hosts(hosts, over):
    words = over("1:2,2:1", "--env", "GREETING=hello there", "says.py")
    status, launched = launch(
        *words, "environment=TF_CONFIG", "environment=GREETING", prefix=hosts.prefix
    )
    assert status == 0, launched.said
    assert launched.out.count("GREETING hello there") == 3
    (cluster,) = set(re.findall(r"TF_CONFIG (.*), \"task\"", launched.out))
    listed = re.findall(r"10\.77\.\d+\.\d+", cluster)
    assert listed == [hosts.names[1], hosts.names[1], hosts.names[2]]


def test_this_host_and_another(hosts, over):
    """Workers of this host are reached at the address from which ssh came."""
    words = ["--hosts", f"localhost,{hosts.names[1]}", "--ssh", hosts.ssh]
    status, launched = launch(*words, "says.py", "0:environment=TF_CONFIG", prefix=hosts.prefix)
    assert status == 0, launched.said
    assert re.findall(r"10\.77\.\d+\.\d+", launched.out) == hosts.names[:2]


@pytest.mark.slow
def test_a_training(hosts, over):
    status, launched = launch(*over("1,2", "fit.py"), prefix=hosts.prefix)
    assert status == 0, launched.said
    weights = re.findall(r"\[\d\] weights (.*)", launched.out)
    assert len(weights) == 2 and len(set(weights)) == 1
    assert "by TCP to 1" in launched.err or "by shared memory to 1" in launched.err


@pytest.mark.slow
def test_doctor_between_hosts(hosts):
    listed = ",".join(hosts.names[1:])
    ran = subprocess.run(
        [*hosts.prefix, sys.executable, "-m", "tfscale", "doctor", "--json", "--hosts", listed,
         "--ssh", hosts.ssh],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)["all_reduce"]
    assert found["workers"] == 2 and found["sum_is_right"]


def test_the_first_failure_is_told_with_its_host(hosts, over):
    words = over("1,2", "says.py", "0.3", "1:error=bad", "1:kill=SIGSEGV", "wait")
    status, launched = launch(*words, prefix=hosts.prefix)
    assert status == 128 + signal.SIGSEGV
    assert f"worker 1 on {hosts.names[2]} failed first" in launched.err
    assert "it was killed by SIGSEGV" in launched.err


def test_a_host_that_does_not_answer(hosts, over):
    gone = hosts.names[0].rpartition(".")[0] + ".99"
    words = ["--hosts", f"{hosts.names[1]},{gone}", "--ssh", hosts.ssh + " -o ConnectTimeout=2"]
    status, launched = launch(*words, "says.py", prefix=hosts.prefix)
    assert status == 255
    assert re.search(rf"{gone}: ssh: connect to host {gone} .*(timed out|No route)", launched.err)


def test_a_host_whose_key_is_unknown(hosts, over, tmp_path):
    ssh = hosts.ssh.replace(str(hosts.known), str(tmp_path / "none"))
    status, launched = launch(*over("1", "says.py", ssh=ssh), prefix=hosts.prefix)
    assert status == 255
    assert "Host key verification failed" in launched.err
    assert "ssh does not know this host yet: connect once by hand" in launched.err


def test_a_host_without_our_key(hosts, over, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", tmp_path / "other"], check=True)
    ssh = hosts.ssh.replace(
        str(hosts.folder / "key"), f"{tmp_path / 'other'} -o IdentitiesOnly=yes"
    )
    status, launched = launch(*over("1", "says.py", ssh=ssh), prefix=hosts.prefix)
    assert status == 255
    assert "ssh could not log in without a password: add your key there" in launched.err


def test_another_version(hosts, over, tmp_path):
    shutil.copytree(ROOT / "tfscale", tmp_path / "tfscale")
    (tmp_path / "tfscale" / "support" / "version.py").write_text('__version__ = "0.0.1"\n')
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    status, launched = launch(*over("1", "--python", python, "says.py"), prefix=hosts.prefix)
    assert status == 255
    assert f"{hosts.names[1]}: tfscale 0.0.1 is installed there, and " in launched.err


def test_a_python_that_is_not_there(hosts, over):
    words = over("1", "--python", "/no/such/python", "says.py")
    status, launched = launch(*words, prefix=hosts.prefix)
    assert status == 255
    assert "there is no such Python there: install it, or name another one" in launched.err


def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(hosts, over):
    words = over("1,2", "--grace", 1, "says.py", "child", "pid", "0:deaf", "wait")
    with Launched(*words, prefix=hosts.prefix) as launched:
        launched.until("waits", 2)
        processes = re.findall(PROCESS, launched.out)
        assert len(processes) == 4 and all(map(runs, processes))
        launched.signal(signal.SIGKILL)
        launched.end()
        assert all_end(processes) == []


def test_a_connection_that_is_cut(hosts, over):
    """The others end; on the host that is cut off the supervisor ends its own, hearing nothing."""
    ssh = hosts.ssh + " -o ServerAliveInterval=1 -o ServerAliveCountMax=2"
    words = over("1,2", "--silence", 5, "says.py", "pid", "wait", ssh=ssh)
    with Launched(*words, prefix=hosts.prefix) as launched:
        launched.until("waits", 2)
        processes = re.findall(PROCESS, launched.out)
        hosts.run(2, "ip", "link", "set", "eth0", "down")
        try:
            assert launched.end() == 255, launched.said
            assert f"worker 1 on {hosts.names[2]} failed first" in launched.err
            assert "its host was lost" in launched.err
            assert all_end(processes) == []
        finally:
            hosts.run(2, "ip", "link", "set", "eth0", "up")


def test_it_goes_on_without_a_host_that_is_lost(hosts, over):
    ssh = hosts.ssh + " -o ServerAliveInterval=1 -o ServerAliveCountMax=2 -o ConnectTimeout=2"
    words = over("1:2,2", "--silence", 5, "--restarts", 1, "--min-workers", 2, ssh=ssh)
    with Launched(
        *words, "says.py", "print=begins", "2:wait", "9", prefix=hosts.prefix
    ) as launched:
        launched.until("begins", 3)
        hosts.run(2, "ip", "link", "set", "eth0", "down")
        try:
            launched.until("with 2 workers instead of 3")
            assert launched.end() == 0, launched.said
            assert launched.out.count("begins") == 5
        finally:
            hosts.run(2, "ip", "link", "set", "eth0", "up")


def test_started_by_hand_on_each_host(hosts):
    common = ["--nnodes", 2, "--master-addr", hosts.names[1], "--master-port", 29400]
    with Launched(
        "--node-rank", 1, *common, "-n", 1, "says.py", "pid", "environment=TF_CONFIG",
        prefix=hosts.others[1],
    ) as second:  # fmt: skip
        status, first = launch(
            "--node_rank=0", *common, "-n", 2, "says.py", "pid", prefix=hosts.others[0]
        )
        assert status == 0, first.said
        assert second.end() == 0, second.said
    assert "[2] process" in second.out and "[1] process" in first.out
    listed = re.findall(r"10\.77\.\d+\.\d+", second.out)
    assert listed == [hosts.names[1], hosts.names[1], hosts.names[2]]
