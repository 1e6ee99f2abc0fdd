"""``tfscale bench adaptive``: what it says of times that are made up, and a run with toys."""

import argparse
import json
import subprocess
import sys

import pytest

from tests.bench.test_link import needs_root
from tfscale.compression import Adaptive, PowerSGD, Settled, Staged, TopK
from tfscale.tools.bench import adaptive, methods


def test_methods_as_words():
    assert methods.method_of("adaptive") == Adaptive()
    among = ("int8", PowerSGD(2), TopK(0.1))
    assert methods.method_of("Adaptive(0.5, ('int8', PowerSGD(2), TopK(0.1)))") == Adaptive(
        0.5, among
    )
    staged = Staged("fp32", "sign", when=Settled(over=9))
    assert methods.method_of("Staged('fp32', 'sign', when=Settled(over=9))") == staged
    for wrong in ("Settled()", "open('x')", "Adaptive(0.5, (open('x'),))", "int7"):
        with pytest.raises(argparse.ArgumentTypeError, match="Give a wire"):
            methods.method_of(wrong)


def test_it_is_compared_with_the_best_fixed_one_and_with_none():
    times = [[0.2, 0.4, 0.2], [0.1, 0.2, 0.1], [0.11, 0.22, 0.1]]
    found = adaptive._results("1gbit", ["fp32", "int8", "Adaptive(1.0)"], [["fp32"]] * 3, times)
    assert [round(each.times, 2) for each in found] == [1, 2, 1.82]
    (note,) = adaptive.notes(found)
    assert "1.10 times as long as with the best fixed method (int8), 0.55 times" in note
    assert adaptive.make_table(found, "1gbit").row_count == 3


def test_what_is_no_rate_is_refused(capsys):
    assert adaptive.main(["--rates", "fast"]) == 1
    assert "'fast' is not a rate" in capsys.readouterr().err


@needs_root
@pytest.mark.full
@pytest.mark.timeout(600)
def test_it_trains_while_links_change(tmp_path):
    words = ["--rates", "1gbit,100mbit", "--methods", "fp32", "int8", "--model", "tiny"]
    words += ["--settle", "1", "--rounds", "2", "--json", str(tmp_path / "found.json")]
    command = [sys.executable, "-m", "tfscale", "bench", "adaptive", *words]
    subprocess.run(command, timeout=500, check=True)
    found = json.loads((tmp_path / "found.json").read_text())["records"]
    assert [each["rate"] for each in found] == ["1gbit"] * 3 + ["100mbit"] * 3
    assert [each["method"] for each in found[:3]] == ["fp32", "int8", "Adaptive(1.0)"]
    assert all(len(each["all_ms"]) == 2 and min(each["all_ms"]) > 0 for each in found)
    assert all(each["chosen"] == ["fp32"] for each in found)  # too small for anything else
