"""Lines of telemetry name the worker that others wait for, and say since when."""

import json

import numpy as np
import pytest

from tfscale.analysis.telemetry.stragglers import late_by, spans, stragglers

STEPS = 200


def write(folder, computed, exchange=0.002):
    """Write the lines of synchronous workers that compute for so many seconds."""
    ends = spans(computed, 0)[1].max(0)
    begins = np.concatenate([[0.0], ends[:-1]]) + 1e9
    for worker, row in enumerate(computed):
        lines = [{"kind": "start", "ranks": [worker]}]
        for step, seconds in enumerate(row):
            whole = float(computed[:, step].max() + exchange)
            lines.append({
                "kind": "step", "step": step, "steps": 1, "begin": float(begins[step]),
                "seconds": whole, "waited": whole - float(seconds), "usual": step > 0,
            })  # fmt: skip
        text = "\n".join(map(json.dumps, lines))
        (folder / f"run.rank{worker}.jsonl").write_text(text + "\n")
    return sorted(folder.glob("run.rank*.jsonl"))


def test_a_worker_that_becomes_slow_is_named_with_the_step_since_when(tmp_path):
    computed = np.full([4, STEPS], 0.1)
    computed[2, 120:] = 0.4
    found = stragglers(write(tmp_path, computed))
    assert found.workers[found.slowest] == "rank 2"
    assert found.steps[found.since] == 120
    np.testing.assert_allclose(found.computed, computed[:, 1:])
    np.testing.assert_allclose(found.waited.max(0)[-1], 0.3)
    said = " ".join(str(found).split())
    assert "The others wait for rank 2: 300 ms of a step, since step 120" in said, said
    # Equal shares take 119 x 0.1 + 80 x 0.4 s. A bound of 8 saves no more than a few steps.
    assert "speed would save" in said and "BoundedStaleness(bound=8) would not help" in said, said


def test_a_bound_helps_workers_that_are_slow_in_turn(tmp_path):
    dice = np.random.default_rng(0)
    computed = np.full([4, STEPS], 0.1)
    computed[dice.integers(0, 4, STEPS), np.arange(STEPS)] = 0.4
    found = stragglers(write(tmp_path, computed))
    assert found.seconds == pytest.approx(0.4 * (STEPS - 1))
    assert found.with_bound(8) < 0.75 * found.seconds
    # No bound can save more than what the busiest worker computes.
    assert found.with_bound(64) >= computed[:, 1:].sum(1).max() - 1e-9


def test_equal_workers_wait_for_nobody(tmp_path):
    dice = np.random.default_rng(0)
    found = stragglers(write(tmp_path, dice.uniform(0.1, 0.101, [3, STEPS])))
    assert found.slowest is None
    assert str(found) == "No worker waits for another one for long."


def test_the_bound_of_a_permanent_straggler_is_its_own_pace():
    slow = np.array([[4.0] * 50, [1.0] * 50])
    for bound in (0, 1, 8, 49):
        assert late_by(slow, bound) == 200
    begins, _ = spans(slow, 8)
    assert begins[1, 8] == 8 and begins[1, 12] == 16  # the other has ended its fourth


def test_a_picture_shows_who_waits_for_whom(tmp_path):
    pytest.importorskip("matplotlib")
    computed = np.full([3, STEPS], 0.1)
    computed[0, 50:] = 0.3
    figure = stragglers(write(tmp_path, computed)).draw()
    (panel,) = figure.axes
    words = [text.get_text() for text in panel.get_legend().get_texts()]
    assert "waits for rank 0" in words and "computes" in words


def test_files_of_different_trainings_are_refused(tmp_path):
    first, second = write(tmp_path, np.full([2, 3], 0.1))
    lines = [json.loads(line) for line in second.read_text().splitlines()]
    for line in lines[1:]:
        line["step"] += 100
    second.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match="have no step in common"):
        stragglers([first, second])
    with pytest.raises(ValueError, match="files is a list of at least two paths"):
        stragglers([first])
