"""``tfscale bench optimizers``, on small variables."""

import pytest

from tfscale.tools.bench import optimizers
from tfscale.tools.bench.optimizers import PARTS

QUICK, SLOW = ("one", "mlp"), ("many", "conv")
NAMES = ("LAMB", "LARS", "keras Lamb", "ResourceApplyAdam", "AdaHessian")


@pytest.mark.slow
@pytest.mark.parametrize("parts", [QUICK, pytest.param(SLOW, marks=pytest.mark.full)], ids=",".join)
def test_it_measures_every_part(parts, capsys):
    words = ["--parts", ",".join(parts), "--rounds", "1", "--shrink", "200"]
    assert optimizers.main(words) == 0
    printed = capsys.readouterr().out
    for name in NAMES:
        assert name in printed
    assert printed.count("1.00x") >= len(parts)


def test_no_part_is_left_out():
    assert {*PARTS} == {*QUICK, *SLOW}
