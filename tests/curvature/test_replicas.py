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
from tests.curvature.replicas import CASES, measured
from tfscale import ScaleStrategy

WORKER = Path(__file__).parent / "workers" / "measure.py"
ROOT = Path(__file__).parents[2]
SECONDS = 600  # on the busiest machine

pytestmark = pytest.mark.slow


def some_or_all(*cases):
    every = pytest.param(tuple(CASES), marks=pytest.mark.full, id="all")
    return pytest.mark.parametrize("cases", [pytest.param(cases, id=", ".join(cases)), every])


@functools.cache
def expected(cases):
    return measured(tf.distribute.get_strategy(), cases)


def check(found, cases):
    assert found.keys() == expected(cases).keys()
    for name, numbers in expected(cases).items():
        size = np.abs(numbers).max()
        np.testing.assert_allclose(found[name], numbers, 0, 1e-5 * size, err_msg=name)


@some_or_all("batch norm")
def test_two_replicas_of_a_process(cases):
    devices = ["CPU:0", "CPU:1"]
    check(measured(ScaleStrategy("ring", devices=devices, own_losses="mean"), cases), cases)


@pytest.mark.timeout(SECONDS + 60)
@some_or_all("weights")
def test_two_processes(cases):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with warm.Workers([str(WORKER), *cases], 2, environment={"PYTHONPATH": path}) as group:
        printed = group.wait(SECONDS)
    told = [re.findall(r"^TOLD (.*)$", output, re.MULTILINE) for output in printed]
    assert told[0] == told[1], "workers have other bits"
    check(json.loads(told[0][0]), cases)
