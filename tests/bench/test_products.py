"""``tfscale bench products``, on small batches."""

import pytest

from tfscale.tools.bench import products


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    ["cost", *(pytest.param(part, marks=pytest.mark.full) for part in ("memory", "processes"))],
)
def test_it_measures(capsys, part):
    chosen = ["--parts", part, "--models", "mlp"]
    assert products.main([*chosen, "--rounds", "1", "--shrink", "64"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  mlp")]
    assert all(float(number.rstrip("x")) > 0 for number in row.split()[1:])
