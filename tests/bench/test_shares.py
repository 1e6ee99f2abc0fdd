"""``tfscale bench shares``, on a few steps; and how it holds processes back."""

import itertools
import subprocess
import sys

import pytest

from tfscale.tools.bench import holding, shares


@pytest.mark.full
def test_it_prints_a_row_for_each_kind_of_shares(capsys):
    assert shares.main(["--workers", "2", "--steps", "6", "--ms", "1"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    found = {row[0]: row for row in rows if row[0] in (shares.EQUAL, shares.FIXED, shares.MEASURED)}
    assert len(found) == 3, printed
    assert found[shares.EQUAL][3] == "50.0%" and found[shares.FIXED][3] == "33.3%"
    assert all(float(row[4]) < 1e-6 for row in found.values()), printed


SPINS = """
import sys, time
from tfscale.tools.bench import holding
holding.begin(sys.argv[1])
begin, used = time.monotonic(), time.process_time()
while time.monotonic() < begin + 1.5:
    pass
print((time.process_time() - used) / (time.monotonic() - begin))
"""


@pytest.mark.parametrize("kind", [holding.QUOTA, holding.STOP])
def test_a_process_gets_a_part_of_a_core(kind):
    try:
        with holding.holds(kind, [0.3]) as (text,):
            got = subprocess.run(
                [sys.executable, "-c", SPINS, text], check=True, capture_output=True, timeout=60
            )
    except holding.HoldError as error:
        assert "--hold stop" in str(error)
        pytest.skip(str(error))
    assert 0 < float(got.stdout) < 0.6  # a busy machine gives less


def test_a_quota_that_cannot_be_had_says_what_it_needs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(holding, "_ROOT", tmp_path / "nowhere")
    assert shares.main(["--hold", "quota"]) == 1
    assert "needs root" in capsys.readouterr().err


def test_cores_are_for_all_workers():
    arguments = shares.make_parser().parse_args(["--slow", "2", "--cores", "1.6"])
    assert shares.cores_of(arguments, 2) == [0.5, 1]
    four = shares.cores_of(arguments, 4)
    assert sum(four) == pytest.approx(1.6) and four[0] == four[1] / 2


def test_workers_that_are_slow_in_turn_agree_who_is():
    arguments = shares.make_parser().parse_args(["--who", "turns", "--ms", "1"])
    each = [itertools.islice(shares._seconds(arguments, me, 3), 60) for me in range(3)]
    steps = list(zip(*each, strict=True))
    assert all(sorted(step) == [0.001, 0.001, 0.002] for step in steps)
    assert {step.index(max(step)) for step in steps} == {0, 1, 2}


def test_a_quota_holds_a_worker_that_is_always_the_same(capsys):
    with pytest.raises(SystemExit):
        shares.main(["--who", "turns", "--hold", "stop"])
    assert "--who turns needs --hold sleep" in capsys.readouterr().err
