"""Workers that do not fit together are refused by name, on all workers."""

import re

import pytest

from tests.strategy.groups import finish, start
from tfscale.strategy.join import _unpacked

pytestmark = pytest.mark.timeout(400)
SECONDS = 300

MODELS = {
    "activation": "has another list of layers",
    "momentum": "has another momentum of the optimizer than",
    "width": "ranks do not agree",
    "more layers": "ranks do not agree",
    "names": "has another list of weights' names",
    "rows": "has another number of steps in an epoch than worker 0 at {}: 5, not 2. Call fit with",
    "batch": "has another batch_size than worker 0 at {}: 4, not 8",
    "epochs": "has another number of epochs than worker 0 at {}: 2, not 1",
    "steps": "has another number of steps in an epoch than worker 0 at {}: 1, not 2",
    "validation": "has another validation_data than worker 0 at {}: some, not none",
    "longer validation": "has another number of steps in a validation than worker 0 at {}: 3, not",
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "field", "values"),
    [
        ("version", "version of tfscale", "0.0.1, not"),
        ("devices", "list of devices", '["CPU:0", "CPU:1"], not ["CPU:0"]'),
        ("wire", "wire", "'int8'"),
    ],
)
def test_another_start(case, field, values):
    for output in run([case]):
        seconds, message = refusals(output)[case]
        print(f"MEASURED {case}: refused after {seconds} s: {message}")
        assert re.search(
            rf"worker 1 at \S+ has another {field} than worker 0 at 127.0.0.1", message
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
