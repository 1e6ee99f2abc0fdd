"""Buckets and repetitions from a memory and a risk, and the arithmetic of the paper."""

import math

import pytest

from tests.extreme.models import mach
from tfscale.extreme import Plan, plan, repetitions_needed
from tfscale.training.extreme.planner import confusion_of


def test_the_arithmetic_of_odp():
    """105,033 classes and 422,713 inputs: 131 times fewer parameters, 1.35 GB against 178 GB."""
    odp = Plan(105_033, buckets=32, repetitions=25, width=422_713, state=1)
    assert round(odp.times_less) == 131
    assert odp.softmax_parameters * 4 / 1e9 == pytest.approx(177.6, abs=0.1)
    assert odp.softmax_parameters * 4 / 2**30 == pytest.approx(165.4, abs=0.1)
    assert odp.head_parameters == 338_171_200
    assert odp.head_bytes / 1e9 == pytest.approx(1.35, abs=0.01)


@pytest.mark.parametrize("buckets", [2, 32, 4096])
@pytest.mark.parametrize("confusion", [0.5, 1e-6])
def test_repetitions_are_as_many_as_the_bound_asks_for(buckets, confusion):
    needed = repetitions_needed(345_000, buckets, confusion)
    assert needed == math.ceil(2 * math.log(345_000 / math.sqrt(confusion)) / math.log(buckets))
    assert confusion_of(345_000, buckets, needed) <= confusion


@pytest.mark.parametrize("memory", ["20MB", "200MB", "2GB"])
def test_a_plan_fits_and_keeps_classes_apart(memory):
    found = plan(345_000, memory, width=256, confusion=0.01)
    assert found.head_bytes <= float(memory[:-2]) * {"M": 1e6, "G": 1e9}[memory[-2]]
    assert found.confusion <= 0.01
    assert found.buckets < found.classes and found.times_less > 1
    assert "345,000 classes in" in found.explain()


def test_more_memory_gives_more_buckets():
    sizes = [plan(345_000, memory, width=256).buckets for memory in ("20MB", "200MB", "800MB")]
    assert sizes == sorted(set(sizes))


def test_a_memory_that_is_too_small_is_told_the_least():
    with pytest.raises(ValueError, match=r"the smallest plan takes [\d,]+ bytes, [24] buckets"):
        plan(345_000, "10KB", width=256)


def test_time_is_that_of_all_repetitions():
    assert Plan(1000, 10, 4, 8, 4).seconds(samples=1001, step=0.5, batch=100) == 4 * 11 * 0.5


def test_explain_counts_classes_that_no_repetition_tells_apart():
    made = mach(classes=50, buckets=2, repetitions=3)
    assert "share all buckets with an earlier one: 42 (probability of any: at most 1)" in (
        made.explain()
    )
