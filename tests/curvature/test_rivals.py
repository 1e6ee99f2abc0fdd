"""Eigenvalues against PyHessian's and curvlinops', for the same weights and data.

These need PyTorch: ``make test-torch`` makes an environment that has it. ``TFSCALE_TORCH_PYTHON``
names another interpreter; by default it is this one, and without PyTorch there the test is skipped.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from tests.curvature.nets import cross_entropy
from tfscale import curvature

PYTHON = os.environ.get("TFSCALE_TORCH_PYTHON", sys.executable)
PROGRAM = Path(__file__).parent / "workers" / "rivals.py"
NEEDS = "import torch, pyhessian, curvlinops, scipy"


def test_eigenvalues_are_those_of_pyhessian_and_of_curvlinops(tmp_path):
    if subprocess.run([PYTHON, "-c", NEEDS], capture_output=True, check=False).returncode:
        if "TFSCALE_TORCH_PYTHON" in os.environ:
            pytest.fail(f"{PYTHON}, which TFSCALE_TORCH_PYTHON names, cannot {NEEDS}")
        pytest.skip("needs PyTorch, PyHessian and curvlinops: make test-torch")
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(16, "tanh"), layers.Dense(16, "tanh")]
    model = keras.Sequential([layers.Input([8]), *hidden, layers.Dense(3)])
    model.compile("adam", cross_entropy())
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 8)).astype("float32")
    y = np.digitize(x[:, 0] + x[:, 1] ** 2, [0.3, 1.3])
    model.fit(x, y, epochs=10, verbose=0)
    found, trace = theirs(tmp_path / "net.npz", model, x, y)
    h = curvature.Hessian(model, x, y, batch_size=64)
    top = h.eigenvalues(top=5, tolerance=1e-5).top
    for name, values in found.items():
        np.testing.assert_allclose(values, top, 1e-3, err_msg=name)
        print(f"{name}: off by {np.abs(np.divide(values, top) - 1).max():.1g}")
    low, high = h.trace(400).total.interval(0.999)
    print(f"trace: {low:.4f} to {high:.4f}, and {trace:.4f} by all columns of curvlinops")
    assert low <= trace <= high


def theirs(file, model, x, y):
    pairs = enumerate(layer.get_weights() for layer in model.layers)
    named = {f"{kind}{i}": w for i, pair in pairs for kind, w in zip("kb", pair, strict=True)}
    np.savez(file, x=x, y=y, **named)
    ran = subprocess.run(
        [PYTHON, str(PROGRAM), str(file)], capture_output=True, text=True, timeout=300, check=False
    )
    assert not ran.returncode, ran.stderr
    found = json.loads(re.search("^FOUND (.*)$", ran.stdout, re.MULTILINE)[1])
    return {name: found[name] for name in ("pyhessian", "curvlinops")}, found["trace"]
