"""A user's own method: that of docs/compression.md."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.compression.methods import Trial, gradients
from tfscale import compression

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compression.md"


@pytest.fixture(scope="module")
def atomo():
    """The class, as the page has it."""
    text = PAGE.read_text()
    start = text.index("import dataclasses")
    names = {"__name__": "own"}
    exec(text[start : text.index("strategy =", start)], names)
    return names["Atomo"]


def test_it_takes_thirty_lines(atomo):
    text = PAGE.read_text()
    start = text.index("@dataclasses.dataclass")
    assert text[start : text.index("strategy =", start)].strip().count("\n") < 30


def test_sums_are_right_on_average(atomo):
    """Sums have a low rank, and are the same on all replicas, as Trial checks."""
    shape, steps = (12, 10), 400
    trial = Trial(atomo(2), [shape])
    (given,) = gradients([shape])
    sums = [trial.sums([given])[0].astype(float) for _ in range(steps)]
    assert np.linalg.matrix_rank(sums[0], tol=1e-4) == 4  # two of each replica
    error = np.mean(sums, axis=0) - sum(given)
    assert np.abs(error).max() < 5 * np.std(sums, axis=0).max() / np.sqrt(steps)


def test_vectors_go_as_they_are(atomo):
    trial = Trial(atomo(2), [(5,)])
    (given,) = gradients([(5,)])
    np.testing.assert_allclose(trial.sums([given])[0], sum(given), rtol=1e-6)


class Wrong(compression.Method):
    """Method whose ``sums`` is a function of the test."""

    def __init__(self, sums):
        self.sums = sums

    def state(self, gradient):
        return {"turn": compression.Kept((), common=True)}

    def __repr__(self):
        return "Wrong()"


def keeps_undeclared(load):
    load.keep("last", load.gradients)
    return load.gradients


def keeps_too_few(load):
    load.keep("turn", [])
    return load.gradients


def keeps_whole_numbers(load):
    load.keep("turn", [tf.cast(turn, tf.int32) + 1 for turn in load.kept("turn")])
    return load.gradients


@pytest.mark.parametrize(
    "sums, said",
    [
        (keeps_too_few, r"Wrong\(\) passes 0 values to load.keep\('turn'\); expected one for each"),
        (keeps_whole_numbers, r"keeps 'turn' as int32; expected float32. Cast it"),
        (keeps_undeclared, r"Wrong\(\) keeps 'last' .* state\(\) does not declare"),
        (
            lambda load: load.gradients[0],
            r"Wrong\(\) returned a tensor, expected a list of one",
        ),
        (lambda load: [], r"sums\(\) of Wrong\(\) returned 0 tensors .* of the shapes \(3, 4\)"),
        (lambda load: [g[0] for g in load.gradients], r"of the shapes \(4,\), expected .*\(3, 4\)"),
    ],
)
def test_a_wrong_method_is_named(sums, said):
    (given,) = gradients([(3, 4)])
    with pytest.raises(ValueError, match=said):
        Trial(Wrong(sums), [(3, 4)]).sums([given])


def test_wires_of_a_method_are_a_tuple():
    class OnOneWire(Wrong):
        wires = "bf16"

    with pytest.raises(ValueError, match=r"wires of Wrong\(\) is a tuple .* got 'bf16'"):
        compression.MethodPolicy(OnOneWire(None))
