"""Workers that do not fit together are refused by name, on all workers."""

import re

import pytest

from tests.strategy.groups import finish, start
from tfscale.strategy.workers.join import _unpacked

pytestmark = pytest.mark.timeout(400)
SECONDS = 300

MODELS = {
    "activation": "workers differ in their list of layers:",
    "momentum": "workers differ in their momentum of the optimizer:",
    "width": "ranks do not agree",
    "more layers": "ranks do not agree",
    "names": "workers differ in their list of weights' names:",
    "rows": "their number of steps in an epoch: worker 1 at {} has 5, and worker 0 at {} has 2.",
    "batch": "their batch_size: worker 1 at {} has 4, and worker 0 at {} has 8",
    "epochs": "their number of epochs: worker 1 at {} has 2, and worker 0 at {} has 1",
    "steps": "their number of steps in an epoch: worker 1 at {} has 1, and worker 0 at {} has 2",
    "validation": "their validation_data: worker 1 at {} has some, and worker 0 at {} has none",
    "longer validation": "their number of steps in a validation: worker 1 at {} has 3, and worker",
}
ACCEPTED = ["rows of one step", "generator", "nothing"]


def run(cases):
    with start("join.py", "2x1", CASES=",".join(cases)) as group:
        outputs, trouble = finish(group, SECONDS)
    assert not trouble
    return outputs


def refusals(output):
    """Seconds and message by case."""
    found = re.findall(r"^REFUSED ([^:]+): (\S+) (.*)$", output, re.MULTILINE)
    return {case: (float(seconds), message) for case, seconds, message in found}


@pytest.mark.parametrize(
    ("case", "field", "values"),
    [
        ("version", "version of tfscale", "has 0.0.1, and worker 0"),
        ("devices", "list of devices", 'has ["CPU:0", "CPU:1"], and worker 0'),
        ("wire", "wire", "'int8'"),
    ],
)
def test_another_start(case, field, values):
    for output in run([case]):
        seconds, message = refusals(output)[case]
        print(f"MEASURED {case}: refused after {seconds} s: {message}")
        assert re.search(
            rf"differ in their {field}: worker 1 at \S+ has .*, and worker 0 at 127.0.0.1", message
        )
        assert values in message
        assert "Start all workers with the same packages, devices and arguments" in message


@pytest.mark.slow
def test_another_model():
    for output in run([*MODELS, *ACCEPTED]):
        found = refusals(output)
        assert list(found) == list(MODELS), output
        for case, what in MODELS.items():
            seconds, message = found[case]
            print(f"MEASURED {case}: refused after {seconds} s: {message}")
            host = r"127\.0\.0\.1:\d+"
            assert re.search(re.escape(what).replace(r"\{\}", host), message), message
            assert "worker 1 at 127.0.0.1:" in message
            assert "worker 0 at 127.0.0.1:" in message
        assert re.findall("^ACCEPTED (.*)$", output, re.MULTILINE) == ACCEPTED


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"{", b"[]", b'{"a": 1}', b"7", b"\0" * 4096])
def test_what_is_no_description_is_refused_by_name(data):
    with pytest.raises(ValueError, match="worker 7 at there sent no description of itself"):
        _unpacked(data, "worker 7 at there")
