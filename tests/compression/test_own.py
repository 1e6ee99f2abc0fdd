"""A user's own method: that of docs/compression.md."""

from pathlib import Path

import numpy as np
import pytest

from tests.compression.methods import Trial, gradients

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
