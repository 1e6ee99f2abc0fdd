"""The integer program: equal to brute force, and to HAWQ's published plans."""

import ctypes

import pytest
import scipy.optimize

from tfscale.analysis.quantize.program import InfeasibleError, Program, Resource
from tfscale.tools.bench import hawq
from tfscale.tools.bench.quantize import brute_force, random_program


@pytest.mark.slow
def test_equals_brute_force_on_300_programs():
    for seed in range(300):
        program = random_program(seed)
        found = program.solve()
        assert found.proven
        assert all(resource.has_room(found.bits) for resource in program.resources)
        assert all(len({found.bits[i] for i in group}) == 1 for group in program.groups)
        assert found.cost == pytest.approx(brute_force(program), rel=1e-9), seed


@pytest.mark.parametrize("case", hawq.cases(), ids=str)
def test_is_never_worse_than_what_hawq_published(case):
    found = case.program().solve()
    assert found.proven
    assert found.cost <= case.published_cost * (1 + 1e-9)
    assert (found.bits == case.published) == (str(case) != "resnet50 size 0.25")


def test_what_the_solver_prints_is_discarded(monkeypatch, capfd):
    real, c = scipy.optimize.milp, ctypes.CDLL(None)

    def prints(*args, **kwargs):
        c.printf(b"transformNewIntegerFeasibleSolution tmpSolver.run();\n")
        return real(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", prints)
    random_program(0).solve()
    print("ours")
    c.fflush(None)
    assert capfd.readouterr().out == "ours\n"


def test_hawqs_published_plan_that_can_be_bettered():
    (case,) = [each for each in hawq.cases() if str(each) == "resnet50 size 0.25"]
    found = case.program().solve()
    saved = sum(costs[4] for costs in case.costs)
    assert f"{saved - case.published_cost:.4f}" == "0.8232"
    assert f"{saved - found.cost:.4f}" == "0.8314"


def test_a_limit_that_is_met_exactly_is_kept():
    uses = [{4: 0.1 * n, 8: 0.2 * n} for n in range(1, 30)]
    limit = sum(each[4] for each in uses)
    found = Program([{4: 1.0, 8: 0.0}] * 29, [Resource("size", uses, limit)]).solve()
    assert set(found.bits) == {4}


def test_an_overshoot_within_the_tolerance_of_the_solver_is_excluded():
    uses = [{4: 1e9, 8: 1e9 + 1.0}, {4: 1.0, 8: 2.0}]
    found = Program([{4: 1.0, 8: 0.0}, {4: 0.5, 8: 0.0}], [Resource("size", uses, 1e9 + 1.0)])
    assert found.solve().bits == (4, 4)


def test_the_smallest_possible_is_said():
    uses = [{2: 1.0, 4: 2.0}, {2: 3.0, 4: 6.0}]
    with pytest.raises(
        InfeasibleError, match="size is at most 3.5, and the smallest possible is 4"
    ):
        Program([{2: 1.0, 4: 0.0}] * 2, [Resource("size", uses, 3.5)]).solve()


def test_limits_that_contradict_each_other_say_what_each_could_be():
    one, other = [{2: 1.0, 4: 2.0}], [{2: 2.0, 4: 1.0}]  # narrow numbers may be slower
    limits = [Resource("size", one, 1.5), Resource("latency", other, 1.5)]
    with pytest.raises(InfeasibleError, match="no widths keep all limits together") as error:
        Program([{2: 1.0, 4: 0.0}], limits).solve()
    assert error.value.smallest == {"size": 2.0, "latency": 2.0}


def test_tied_layers_need_a_width_in_common():
    with pytest.raises(ValueError, match="tied layers have no width in common"):
        Program([{8: 0.0}, {4: 1.0}], ties=[[0, 1]])
