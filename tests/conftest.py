"""What holds for all tests: the same examples each time, and TensorFlow with several devices."""

import os
import sys

import hypothesis
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

DEVICES = 8

# No test may fail because a machine is busy, or because dice fell otherwise than yesterday.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def logical_devices():
    """Eight logical CPUs, if any test of this session brought TensorFlow in: it wants to know
    them before it starts.
    """
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, logical)
