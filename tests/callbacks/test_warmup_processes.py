"""Learning rates and batches in two processes: as on one device."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.callbacks.warmups import compiled, momentum
from tests.callbacks.workers.warmup import train

WORKER = Path(__file__).parent / "workers" / "warmup.py"
ROOT = Path(__file__).parents[2]
SECONDS = 600  # on the busiest machine


@pytest.mark.timeout(SECONDS + 60)
def test_two_processes_train_as_one_device():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with warm.Workers([str(WORKER)], 2, environment={"PYTHONPATH": path}) as group:
        printed = group.wait(SECONDS)
    alone = train(compiled(momentum()), batch_per_replica=8)
    for output in printed:
        (found,) = re.findall(r"^TRAINED (.*)$", output, re.MULTILINE)
        trained = json.loads(found)
        assert trained["batch"] == alone["batch"] == [8, 12, 24, 24]
        assert trained["rate"] == alone["rate"]
        for mine, expected in zip(trained["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)
