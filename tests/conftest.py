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


def cases_of_tests(items):
    cases = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return cases.items()


def drawn(test, cases, one_in):
    """Return one in ``one_in`` of a test's cases, at least one, the same ones each time."""
    return set(random.Random(test).sample(cases, -(-len(cases) // one_in)))


def slow_cases(items):
    """Yield the cases that the mark ``one_in`` of their test does not draw."""
    for test, cases in cases_of_tests(items):
        cases = [case for case in cases if not case.get_closest_marker("full")]
        mark = cases[0].get_closest_marker("one_in") if cases else None
        yield from set(cases) - drawn(test, cases, *mark.args) if mark else ()


def taken(items, one_in):
    """Return the cases that ``--one-in`` draws of each test."""
    return {case for test, cases in cases_of_tests(items) for case in drawn(test, cases, one_in)}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark cases before marks deselect some, and draw from what marks have left."""
    for case in slow_cases(items):
        case.add_marker("slow")
    result = yield
    if one_in := config.getoption("--one-in"):
        left = taken(items, one_in)
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = [item for item in items if item in left]
    return result


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
