"""The demo as a user runs it, only shorter."""

import configparser
import re
import subprocess
import sys

import pytest
from helpers import ROOT

from tfscale.tools.demo import _FOR_THE_PICTURE, _NEEDED, main
from tfscale.tools.demo.training import _notes

pytestmark = pytest.mark.timeout(960)


def demo(*words):
    return subprocess.run(
        [sys.executable, "-m", "tfscale", "demo", *words],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


def rows(table):
    """Accuracy, MB, ms and distance by the training's name; the progress bars have none of it."""
    found = re.findall(r"^ ?(one device|2 x 2, \w+) +([\d.]+)% +(\S+) +(\S+) *(\S*)", table, re.M)
    return {name: [float(number or 0) for number in numbers] for name, *numbers in found}


@pytest.mark.slow
def test_replicas_train_as_one_device_and_int8_sends_a_quarter(tmp_path):
    picture = tmp_path / "demo.png"
    done = demo("--epochs", "2", "--out", str(picture))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "ended with the same weights, to the bit" in done.stdout
    one, exact, int8 = (rows(done.stdout)[n] for n in ("one device", "2 x 2, fp32", "2 x 2, int8"))
    assert exact[3] < 1e-5 < int8[3]
    assert one[1] == 0 < 3.5 * int8[1] < exact[1]
    assert picture.stat().st_size > 10_000


def test_a_picture_that_cannot_be_written_is_refused_before_all_else(tmp_path):
    done = demo("--out", str(tmp_path / "nowhere" / "demo.png"))
    assert done.returncode == 1
    assert "cannot write" in done.stderr and "epoch" not in done.stderr


@pytest.mark.parametrize(
    ("module", "package"), [("sklearn", "scikit-learn"), ("tensorflow", "tensorflow-cpu")]
)
def test_what_it_needs_is_asked_for_before_tensorflow_starts(module, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert main([]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert said.err == f"tfscale demo: error: not installed: {package}. pip install {package}\n"


def test_the_extra_brings_all_that_the_demo_needs():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extra = setup["options.extras_require"]["demo"].split()
    assert {*extra, "tensorflow-cpu"} == {*_NEEDED.values(), *_FOR_THE_PICTURE.values()}


def test_notes_are_found_among_what_tensorflow_says():
    output = 'WARNING: so\n{"epoch": {"loss": 1.5}}\nI0000 so\n{"epoch": {"lo'
    assert _notes(output) == [{"epoch": {"loss": 1.5}}]
