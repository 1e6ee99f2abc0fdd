"""Times that follow from the log alone, and so do not depend on the machine."""

import pytest

from tfscale.analysis.telemetry.steps import Mean, Window, split
from tfscale.ops import BucketId, Execution


def saved(bucket):
    return 3.0 if "int8" in bucket.label else 0.0


def behind_steps(bucket):
    return "changes" in bucket.label


def window(*executions, **how):
    made = Window(
        **{"epoch": 0, "batch": 0, "step": 0, "steps": 1, "begin": 0.0, "end": 10.0, **how}
    )
    made.account([[Execution(*each) for each in rank] for rank in executions], saved, behind_steps)
    return made


FIRST = (BucketId("gradients 0", "sgd"), 2.0, 4.0, 100)
SECOND = (BucketId("gradients 1 int8", "sgd"), 5.0, 8.0, 50)
OTHER = (BucketId("reduce"), 0.0, 1.0, 8)


def test_exposed_begins_when_the_last_gradients_are_handed_over():
    found = window([OTHER, FIRST, SECOND])
    assert found.exposed == 3.0
    assert found.communication == 1.0 + 2.0 + 3.0
    assert (found.sent, found.saved) == (158, 150)


def test_time_in_communication_counts_once():
    slow = (BucketId("gradients 0", "sgd"), 2.0, 9.0, 100)
    found = window([slow, SECOND])
    assert found.communication == 7.0
    assert found.exposed == 9.0 - 5.0


def test_of_several_ranks_it_is_that_which_waits_least():
    """The other had its gradients long before, and waits for this one's."""
    early = [(BucketId("gradients 1 int8", "sgd"), 3.0, 8.0, 50)]
    found = window(early, [SECOND])
    assert (found.exposed, found.communication) == (3.0, 3.0)
    assert found.sent == 100


def test_steps_of_a_window_are_exposed_one_by_one():
    later = [(name, start + 10, end + 10, sent) for name, start, end, sent in (FIRST, SECOND)]
    assert window([FIRST, SECOND, *later], steps=2, end=20.0).exposed == 6.0


def test_optimizers_are_exposed_one_by_one():
    other = (BucketId("gradients 0", "adam"), 8.5, 9.0, 10)
    assert window([FIRST, SECOND, other]).exposed == 3.5


def test_what_travels_behind_steps_is_not_exposed():
    changes = (BucketId("changes of fragment 1 0", "adam"), 1.0, 9.0, 10)
    found = window([changes, FIRST, SECOND])
    assert (found.exposed, found.communication) == (3.0, 8.0)


def test_two_sums_that_wait_for_one_rank_count_once():
    loss = (BucketId("reduce"), 4.5, 8.5, 8)
    assert window([OTHER, FIRST, SECOND, loss]).waited == 1.0 + 8.5 - 4.5


def test_a_step_without_gradients_exposes_nothing():
    found = window([OTHER], [OTHER])
    assert (found.exposed, found.communication, found.sent) == (0, 1.0, 16)


def test_executions_belong_to_the_turn_in_which_they_begin():
    windows = [Window(0, i, i, 1, 10.0 * i, 10.0 * i + 9) for i in range(3)]
    executions = [Execution("a", start, start + 3, 1) for start in (0.0, 8.5, 9.5, 10.0, 20.0)]
    starts = [[one.start for one in each] for each in split(executions, windows)]
    assert starts == [[0.0, 8.5], [10.0], [20.0]]


def test_means_are_of_what_is_known():
    mean = Mean()
    mean.add(window([FIRST, SECOND], samples=40))
    mean.add(Window(0, 1, 1, 1, 10.0, 20.0))
    found = mean.numbers(devices=2, baseline=None)
    assert found["step_ms"] == 10_000
    assert found["samples_per_second"] == 4
    assert found["exposed_ms"] == 3_000
    assert found["sent_mb"] == pytest.approx(150e-6)
    assert found["efficiency_estimated"] == pytest.approx(1 - 3 / 10)
    assert mean.numbers(devices=2, baseline=2.5)["efficiency_measured"] == pytest.approx(
        4 / (2 * 2.5)
    )
    assert Mean().numbers(2, None) == {}
