"""A training is killed at each call by which it touches files, and started again.

What it restores is what an uninterrupted training had at that epoch, and so is the end.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfscale.native.toolchain import find_compiler

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLE = 5
EPOCHS, STEPS = 3, 2

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Build a library that ends a process at a chosen call."""
    path = tmp_path_factory.mktemp("library") / "kill_at.so"
    compiler = [*find_compiler().command, "-x", "c", "-shared", "-fPIC", "-Wall", "-Werror"]
    subprocess.run([*compiler, HERE / "kill_at.c", "-ldl", "-o", path], check=True)
    return path


@pytest.fixture(scope="module")
def run(library, tmp_path_factory):
    """Yield a function that runs trainings, and returns their reports and complaints."""
    said = tmp_path_factory.mktemp("said") / "stderr"
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, HERE / "workers" / "saves.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with said.open("w") as stderr, subprocess.Popen(
        command, env=environment, stderr=stderr, **pipes
    ) as process:  # fmt: skip

        def records(orders):
            found, before = [], said.stat().st_size
            for order in orders:
                print(json.dumps(order), file=process.stdin, flush=True)
                found.append(record(process.stdout))
                assert found[-1], said.read_text()[-3000:]
            return found, said.read_text()[before:]

        yield records
        process.stdin.close()


def record(lines):
    """The next one; None if the process has ended without."""
    found = (line for line in lines if line.startswith("RECORD "))
    return json.loads(next(found, "RECORD null").removeprefix("RECORD "))


@pytest.fixture(scope="module")
def uninterrupted(run, tmp_path_factory):
    ((whole,), _) = run([{"folder": str(tmp_path_factory.mktemp("whole")), "kill": 0}])
    assert [steps for steps, _ in whole["begins"].values()] == [0, STEPS, 2 * STEPS]
    return whole


def assert_goes_on(again, uninterrupted, first):
    """Started again, a training begins with what another had at that epoch, and ends as it."""
    assert again["end"] == uninterrupted["end"]
    begins = again["begins"]
    assert all(begins[epoch] == uninterrupted["begins"][epoch] for epoch in begins)
    assert min(map(int, begins), default=EPOCHS) >= first


def assert_survives(run, uninterrupted, folder, moments, double):
    """Each moment in a folder of its own."""
    orders = []
    for moment in moments:
        order = {"folder": str(folder / str(moment)), "double": double}
        orders += [{**order, "kill": moment}, order]
    records, _ = run(orders)
    removed_from = uninterrupted["calls"][0]
    for moment, killed, again in zip(moments, records[::2], records[1::2], strict=True):
        assert killed == {"ended": -9}, f"moment {moment}"
        # A backup that is being removed is of a training that has ended.
        assert_goes_on(again, uninterrupted, first=0 if moment > removed_from else 1)


def moments(of, total):
    """Some of all, with an equal distance."""
    return [1 + i * total // of for i in range(of)]


@pytest.mark.slow
def test_a_training_that_is_killed_in_a_save_goes_on(run, uninterrupted, tmp_path):
    chosen = moments(SAMPLE, uninterrupted["calls"][1])
    assert_survives(run, uninterrupted, tmp_path, chosen, double=True)


@pytest.mark.full
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("part", range(4))
def test_a_training_that_is_killed_at_any_call_goes_on(run, uninterrupted, tmp_path, double, part):
    order = {"folder": str(tmp_path / "whole"), "kill": 0, "double": double}
    ((whole,), _) = run([order])
    every = range(1, whole["calls"][1] + 1)
    assert whole["end"] == uninterrupted["end"]
    assert_survives(run, whole, tmp_path, every[part::4], double)


@pytest.mark.full
def test_a_full_disk_ends_a_training_with_an_error_and_leaves_the_last_backup(
    run, uninterrupted, tmp_path
):
    """The process ends as after any other error: HDF5 would end it by a segmentation fault."""
    sizes = [15000, 23250]  # bytes of a file: in the weights, and behind them
    orders = []
    for size in sizes:
        order = {"folder": str(tmp_path / str(size)), "double": False}
        orders += [{**order, "bytes": size}, order]
    records, said = run(orders)
    for refused, again in zip(records[::2], records[1::2], strict=True):
        assert refused == {"ended": 1}
        assert_goes_on(again, uninterrupted, first=1)
    assert said.count("the last backup there is unchanged: [Errno 27]") == len(sizes)


@pytest.mark.full
def test_the_same_on_a_disk_that_is_full(run, uninterrupted, tmp_path):
    """Three files do not fit: that of before, the last, and one beside."""
    mount = functools.partial(subprocess.run, check=True, capture_output=True)
    try:
        mount(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no file system may be mounted here: {error.stderr.decode()}")
    try:
        order = {"folder": str(tmp_path / "backup"), "double": True}
        ((refused,), said) = run([order])
        assert refused == {"ended": 1} and "[Errno 28]" in said
        mount(["mount", "-o", "remount,size=1m", tmp_path])
        ((again,), _) = run([order])
        assert_goes_on(again, uninterrupted, first=2)
    finally:
        mount(["umount", tmp_path])
