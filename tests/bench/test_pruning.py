"""Parts of ``tfscale bench pruning``; the figures are in docs/benchmarks/pruning.md."""

import numpy as np
import pytest

from tfscale.tools.bench import pruning


@pytest.fixture
def digits(monkeypatch):
    dice = np.random.default_rng(0)
    x, y = dice.standard_normal((1064, 28, 28, 1)).astype("float32"), np.arange(1064) % 10
    monkeypatch.setattr(pruning, "mnist", lambda: ((x[:64], y[:64]), (x[1000:], y[1000:])))


def options(*argv):
    return pruning.make_parser().parse_args(argv)


@pytest.mark.full
def test_integers_equal_five_nets(digits):
    _, rows = pruning.integers(options("--rows", "8"))
    assert len(rows) == 15 and all(equal == count for _, _, equal, count, _ in rows)


@pytest.mark.full
def test_nets_lose_half_of_their_channels(digits):
    _, (row,) = pruning.channels(options("--seeds", "1", "--epochs", "4"))
    assert row["fisher_off"] < 1e-5 and row["magnitude_off"] < 1e-5
    assert row["fisher_bytes"] < row["bytes"] and row["fisher_parameters"] < 0.4
