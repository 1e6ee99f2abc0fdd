"""``tfscale bench telemetry``, on a toy."""

import pytest
import tensorflow as tf

from tfscale.tools.bench import telemetry
from tfscale.tools.bench.telemetry import PARTS


@pytest.mark.slow
def test_it_measures_every_part(capsys):
    assert len(tf.config.list_logical_devices("CPU")) > 1  # of conftest.py, which saw the import
    assert telemetry.main(["--rounds", "1", "--steps", "4", "--model", "tiny"]) == 0
    printed = capsys.readouterr().out
    for name in ("without", "without, again", "progress bar alone", "JSON lines, TensorBoard"):
        assert printed.count(name + "  ") >= len(PARTS)
    assert printed.count("+0.00%") >= len(PARTS)
