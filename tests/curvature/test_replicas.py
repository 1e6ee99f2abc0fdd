"""Operators on replicas of one process, and of two: the numbers are those of one device."""

import functools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests import warm
from tests.curvature.replicas import measured
from tfscale import ScaleStrategy

WORKER = Path(__file__).parent / "workers" / "measure.py"
ROOT = Path(__file__).parents[2]
SECONDS = 600  # on the busiest machine

pytestmark = pytest.mark.slow


@functools.cache
def expected():
    return measured(tf.distribute.get_strategy())


def check(found):
    assert found.keys() == expected().keys()
    for name, numbers in expected().items():
        size = np.abs(numbers).max()
        np.testing.assert_allclose(found[name], numbers, 0, 1e-5 * size, err_msg=name)


def test_two_replicas_of_a_process():
    devices = ["CPU:0", "CPU:1"]
    check(measured(ScaleStrategy("ring", devices=devices, own_losses="mean")))


@pytest.mark.timeout(SECONDS + 60)
def test_two_processes():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with warm.Workers([str(WORKER)], 2, environment={"PYTHONPATH": path}) as group:
        printed = group.wait(SECONDS)
    told = [re.findall(r"^TOLD (.*)$", output, re.MULTILINE) for output in printed]
    assert told[0] == told[1], "workers have other bits"
    check(json.loads(told[0][0]))
