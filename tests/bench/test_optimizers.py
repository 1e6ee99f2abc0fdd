"""``tfscale bench optimizers``, on small variables."""

from tfscale.tools.bench import optimizers
from tfscale.tools.bench.optimizers import PARTS


def test_it_measures_every_part(capsys):
    assert optimizers.main(["--rounds", "1", "--shrink", "200"]) == 0
    printed = capsys.readouterr().out
    for name in ("LAMB", "LARS", "keras Lamb", "ResourceApplyAdam", "AdaHessian"):
        assert name in printed
    assert printed.count("1.00x") >= len(PARTS)
