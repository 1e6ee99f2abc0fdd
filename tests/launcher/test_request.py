"""Command lines of users, and errors that say what to type instead."""

import os
import re

import pytest

from tests.launch.test_sources import srun
from tests.launcher.launching import PROGRAMS
from tfscale.support import cgroups
from tfscale.tools.launch import hosts as named, machine, supervised
from tfscale.tools.launch.command import described, of_repetition
from tfscale.tools.launch.hosts import Host, places
from tfscale.tools.launch.request import parse


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.chdir(PROGRAMS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def refused(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        parse([*words])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


# --------------------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        (["says.py"], [("localhost", 1)]),
        (["-n4", "says.py"], [("localhost", 4)]),
        (["-H", "a:2,b", "says.py"], [("a", 2), ("b", 1)]),
        (["-n", "3", "--hosts", "a,me@b:1", "says.py"], [("a", 3), ("me@b", 1)]),
        (["-H", "a,b:2,a,a:1", "says.py"], [("a", 3), ("b", 2)]),  # a line per worker
        (["-np", "3", "-H", "a:2,b:2,c:2", "says.py"], [("a", 2), ("b", 1)]),
        (["-H", "[fe80::1]:2,10.0.0.1:1", "says.py"], [("[fe80::1]", 2), ("10.0.0.1", 1)]),
    ],
)
def test_hosts(words, hosts):
    assert parse(words).hosts == [Host(*host) for host in hosts]


def test_a_file_of_hosts(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\na:2\n\nb slots=4  # large\n c\n")
    assert named.in_file(file, 1) == [Host("a", 2), Host("b", 4), Host("c", 1)]


@pytest.mark.parametrize(
    "text", ["", "# none\n", "a b c\n", "a slots=two\n", "a:0\n", "-oProxy:1\n"]
)
def test_a_file_that_is_refused(tmp_path, text):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"expected|such as 'host:2'"):
        named.in_file(file, 1)


def test_ranks_count_host_by_host():
    assert [tuple(place) for place in places([Host("a", 2), Host("b", 1)], 5)] == [
        (5, 0, 0),
        (6, 0, 1),
        (7, 1, 0),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-n", "0", "says.py"],
            "-n 0 is neither a number of workers nor one of cpu, gpu and auto",
        ),
        (["-n", "gpu", "says.py"], "this host has no GPU; use a number, or -n cpu"),
        (["-n", "2", "-np", "2", "says.py"], "-np is the total and -n is per host"),
        (["-np", "5", "-H", "a:2,b:2", "says.py"], "the hosts have room for 4: a:2, b:2"),
        (["-H", ",,", "says.py"], "names no host"),
        (["--env", "=x", "says.py"], "expected NAME or NAME=VALUE"),
        (
            ["--nnodes=2", "--node-rank=0", "--master-addr=h:abc", "says.py"],
            "neither a host nor host:port",
        ),
        (["-H", "a:b", "says.py"], "'a:b' is not a host with a number of workers"),
        (["-H", "a", "--nnodes", "2", "says.py"], "--nnodes is for launchers that are started"),
        (["--nnodes", "1:4", "says.py"], "expected one number; for fewer workers after a failure"),
        (["--nnodes", "2", "says.py"], "--nnodes needs --node-rank"),
        (["--nnodes=2", "--node-rank=2", "--master-addr=a", "says.py"], "not between 0 and 1"),
        (["-n", "2", "--min-workers", "3", "says.py"], "--min-workers 3 is not between 1 and 2"),
        (
            ["--nnodes=2", "--node-rank=0", "--master-addr=a", "--min-workers=1", "says.py"],
            "start all from one host, by --hosts a:2,b:2 --restarts N --min-workers M",
        ),
        (
            ["--rdzv_backend=c10d", "says.py"],
            "there is no --rdzv_backend here: launchers that are started by hand meet at the "
            "first one: leave it out, and give each --nnodes N --node-rank I --master-addr HOST",
        ),
        (["-np", "2", "--gloo", "python", "says.py"], "sockets of tfscale's own"),
        (["--rdzv-id", "7", "says.py"], "different values of --master-port"),
        (["--env", "NO_SUCH_VARIABLE", "says.py"], "there is no such variable here"),
        (["no-such-command"], "neither a file that ends with .py nor a command"),
        (["nowhere.py"], "there is no nowhere.py in "),
        ([], "required: program"),
    ],
)
def test_what_is_refused(capsys, words, message):
    assert message in refused(capsys, *words)


# --------------------------------------------------------------------------- shares


def gpus_of(words):
    return re.findall(
        r"worker \d on localhost: .*?CUDA_VISIBLE_DEVICES=(\S+)", described(parse(words))
    )


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert gpus_of(["-n", "2", "says.py"]) == ["4,5", "6,7"]
    assert gpus_of(["-n", "gpu", "says.py"]) == ["4", "5", "6", "7"]
    assert gpus_of(["-n", "auto", "--devices-per-worker", "2", "says.py"]) == ["4,5", "6,7"]
    assert gpus_of(["-n", "2", "--devices-per-worker", "1", "says.py"]) == ["4", "5"]
    with pytest.raises(
        ValueError, match="5 workers with 1 GPU each need 5 GPUs, and this host has 4"
    ):
        described(parse(["-n", "5", "says.py"]))


@pytest.mark.parametrize("nothing", ["NoDevFiles", "none", "void", "-1", ""])
def test_words_for_no_gpu(monkeypatch, nothing):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
    assert gpus_of(["-n", "2", "says.py"]) == []


def test_a_quota_counts_as_so_many_cores(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: list(range(64)))
    monkeypatch.setattr(cgroups, "processors", lambda: 3.9)
    assert parse(["-n", "cpu", "says.py"]).hosts == [Host("localhost", 4)]
    assert "TF_NUM_INTRAOP_THREADS=2" in described(parse(["-n", "2", "says.py"]))


def test_an_address_with_a_user_is_one_that_ssh_knows():
    (*_, name, _) = supervised._command(Host("me@[2001:db8::1]", 1), "ssh", "python3")
    assert name == "me@2001:db8::1"


def test_without_gpus_a_worker_per_core_or_several_logical_cpus():
    cores = len(os.sched_getaffinity(0))
    assert parse(["-n", "auto", "says.py"]).hosts == [Host("localhost", cores)]
    assert "TFSCALE_LOGICAL_CPUS=3" in described(parse(["--devices-per-worker", "3", "says.py"]))


# ------------------------------------------------------------------------- commands


def test_arguments_behind_the_program_are_its_own():
    request = parse(["-n", "2", "says.py", "-n", "3", "--hosts", "x"])
    assert request.command[1:] == ["says.py", "-n", "3", "--hosts", "x"]
    assert parse(["-m", "package.train", "-m"]).command[1:] == ["-m", "package.train", "-m"]


def test_other_hosts_get_what_is_about_training(monkeypatch):
    for name in ("TF_CONFIG", "TF_XLA_FLAGS", "SECRET", "WANDB_KEY"):
        monkeypatch.setenv(name, name.lower())
    found = parse(["--env", "WANDB_KEY", "--env", "A=b=c", "says.py"]).environment
    assert found["TF_XLA_FLAGS"] == "tf_xla_flags" and found["WANDB_KEY"] == "wandb_key"
    assert found["A"] == "b=c"
    assert not found.keys() & {"TF_CONFIG", "SECRET"}


# --------------------------------------------------------------------------- within others


def test_launchers_that_srun_starts_are_told_that_each_trains_alone():
    """The first of them is."""
    alone = parse(["-n2", "says.py"])
    told = of_repetition(alone, srun(0, 4, 0, 0))
    assert told.startswith("Slurm starts this command 4 times") and "leave out" in told
    assert not of_repetition(alone, srun(1, 4, 0, 1))
    assert not of_repetition(alone, {**srun(0, 1), "SLURM_STEP_TASKS_PER_NODE": "1"})
    assert not of_repetition(alone, {})
    together = parse(["--nnodes", "4", "--node-rank", "0", "--master-addr", "a", "-n2", "says.py"])
    assert not of_repetition(together, srun(0, 4, 0, 0))
