"""The program of docs/ray.md under a real Ray: ``make test-ray`` makes the environment for it."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.processes import ROOT
from tests.launch.test_cluster import PLAIN

PATIENCE = 500  # seconds, six times what it takes
PROGRAMS = Path(__file__).parent / "programs"
# Ray's workers give way to all other processes of a machine, as to tests that run beside this one.
POLITE_TO_NOBODY = {"RAY_worker_niceness": "0"}
PYTHON = os.environ.get("TFSCALE_RAY_PYTHON", "")
pytestmark = [
    pytest.mark.timeout(PATIENCE + 60),
    pytest.mark.skipif(not PYTHON, reason="TFSCALE_RAY_PYTHON names no Python: make test-ray"),
]


def run(program, *arguments, **variables):
    return subprocess.run(
        [str(ROOT / PYTHON), str(PROGRAMS / program), *map(str, arguments)],
        env={**PLAIN, **POLITE_TO_NOBODY, **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def test_a_worker_is_killed_and_the_training_goes_on_from_its_backup(tmp_path):
    page = (ROOT / "docs" / "ray.md").read_text()
    (program,) = re.findall(r"^```py\n(# train.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    ran = run("under_ray.py", tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = dict(re.findall(r"^([A-Z]+) (.*)$", ran.stdout, re.MULTILINE))
    assert json.loads(found["METRICS"])["epoch"] == 4
    epochs = json.loads(found["EPOCHS"])
    assert epochs in ([0, 1, 2, 3, 4], [0, 1, 2, 2, 3, 4]), "once more, if the kill came first"
    assert (tmp_path / "killed").exists()
    assert float(found["ERROR"]) < 1e-6


def test_a_model_of_tf_keras_is_refused():
    ran = run("of_tf_keras.py", TF_USE_LEGACY_KERAS="1")
    assert "this model is of tf_keras, which is Keras 2" in ran.stderr, ran
