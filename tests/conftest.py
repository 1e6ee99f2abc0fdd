"""TensorFlow wants to know its logical devices before it starts."""

import os
import sys

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

DEVICES = 8


@pytest.fixture(scope="session", autouse=True)
def logical_devices():
    """Eight logical CPUs, if any test of this session brought TensorFlow in."""
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, logical)
