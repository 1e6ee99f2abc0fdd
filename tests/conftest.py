"""Settings of all tests: the same examples each time, and TensorFlow with several devices."""

import collections
import gc
import os
import random
import signal
import sys

import hypothesis
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

DEVICES = 8

# What a shell runs in its background ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may fail because a machine is busy, or because dice fell otherwise than yesterday.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")


def pytest_addoption(parser):
    parser.addoption(
        "--one-in",
        type=int,
        metavar="N",
        help="of the cases of each test, run one in N (at least one), drawn by their names",
    )
    parser.addoption(
        "--all-of",
        metavar="FILE",
        help="run all cases of the tests in this file, whatever --one-in says",
    )


@pytest.hookimpl(trylast=True)  # of those that marks have left
def pytest_collection_modifyitems(config, items):
    one_in = config.getoption("--one-in")
    if not one_in:
        return
    whole, cases, taken = config.getoption("--all-of"), collections.defaultdict(list), set()
    for item in items:
        if whole and item.nodeid.startswith(f"{whole}::"):
            taken.add(item)
        else:
            cases[item.nodeid.partition("[")[0]].append(item)
    for test, its in cases.items():
        taken.update(random.Random(test).sample(its, -(-len(its) // one_in)))
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = [item for item in items if item in taken]


def pytest_collection_finish(session):
    """Make garbage collections cheap and rare: full ones took a twelfth of all processor time.

    TensorFlow and the tests are half a million objects that live as long as the process.
    """
    gc.collect()
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(4 * youngest, middle, 40)


_seconds = collections.Counter()  # of each file of tests, with what its fixtures took


def pytest_runtest_logreport(report):
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish():
    """Note what each file took for .ci/timed, which prints the slowest ones."""
    if times := os.environ.get("TIMES"):
        with open(f"{times}.files", "a") as notes:
            notes.writelines(f"{seconds:.0f} {file}\n" for file, seconds in _seconds.items())
    # Python would take apart what tests have left, for seconds, though the process ends.
    gc.freeze()


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
