"""Recomputed tensors, and the memory that this takes, on steps made by hand."""

import dataclasses
import math
import pickle
import re
import signal

import keras
import pytest
import tensorflow as tf

from tfscale.recompute import trace
from tfscale.training.recompute import budget as budgets
from tfscale.training.recompute.budget import BudgetError, plan_budget
from tfscale.training.recompute.early import with_early_products
from tfscale.training.recompute.late import positions
from tfscale.training.recompute.plan import KERNEL, Plan
from tfscale.training.recompute.planners import plan_layers, plan_sqrt
from tfscale.training.recompute.simulate import memory, moments_of
from tfscale.training.recompute.text import show
from tfscale.training.recompute.traced_step import Again, Op, Piece, Tensor, TracedStep, Unit

SIZE = 1_000_000


def chain(depth, lasting=()):
    """Layers f(x) = act(x w): the backward pass of each needs its two results.

    Tensors: 0 the input; 2 i + 1 the product and 2 i + 2 the activation of layer i; then
    the gradients.
    """
    ops = [Op("Placeholder", (), (0,))]
    for i in range(depth):
        ops.append(Op("MatMul", (2 * i,), (2 * i + 1,), 10.0))
        ops.append(Op("Erfc", (2 * i + 1,), (2 * i + 2,), 1.0))
    last = 2 * depth
    ops.append(Op("Loss", (last,), (last + 1,), 1.0))
    for k, i in enumerate(reversed(range(depth)), last + 1):
        ops.append(Op("Backward", (k, 2 * i + 1, 2 * i + 2, 2 * i), (k + 1,), 20.0))
    units = [
        Unit(f"l{i}", frozenset({"model", f"l{i}"}), 2 * i + 1, 2 * i + 3, range(i, i + 1))
        for i in range(depth)
    ]
    count = last + depth + 2
    tensors = [Tensor(SIZE, number, number in lasting) for number in range(count)]
    return TracedStep(ops, units, tensors, (count - 1,))


def test_the_border_is_kept_and_all_else_computed_again():
    step = chain(3)
    assert step.again(step.ops_of(range(0, 2))) == Again((1, 2, 3), frozenset({1, 2, 3}), 9)


def test_what_is_lasting_is_not_computed_again():
    step = chain(3, lasting={1})
    assert step.again(step.ops_of(range(0, 1))) is None
    assert step.again(step.ops_of(range(0, 2))).ops == (2, 3)


def test_memory_of_a_chain():
    step = chain(3)
    # input, six results, two gradients; and one result of an operation at the same time
    assert max(memory(step)) == 9 * SIZE + SIZE
    again = [step.again(step.ops_of(range(0, 2)))]
    # input, border, the kept layer's two, two gradients; or the segment's four and two
    assert max(memory(step, again)) == 7 * SIZE + SIZE


def attention(constant=True, elsewhere=True):
    """A softmax y whose gradient is c (x y), where x is made of y."""
    first = "Const" if constant else "Placeholder"
    ops = [
        Op(first, (), (0,)),  # c
        Op("Placeholder", (), (1,)),
        Op("Softmax", (1,), (2,)),  # y
        Op("MatMul", (2,), (3,)),
        Op("Loss", (3,), (4,)),
        Op("Backward", (4, 2) if elsewhere else (4,), (5,)),  # x
        Op("Mul", (5, 2), (6,)),
        Op("Mul", (6, 0), (7,)),
    ]
    units = [Unit("softmax", frozenset({"softmax"}), 2, 4, range(0, 1))]
    tensors = [Tensor(SIZE, number) for number in range(8)]
    return TracedStep(ops, units, tensors, (7,), frozenset({0} if constant else ()))


def test_a_product_with_a_constant_is_computed_as_early_as_it_can_be():
    step = with_early_products(attention())
    assert step.ops[2].outputs == (2, 8)
    assert step.ops[6].inputs == (5, 2, 8)
    assert max(memory(step)) == max(memory(attention())) + SIZE


@pytest.mark.parametrize("how", [{"constant": False}, {"elsewhere": False}])
def test_no_other_product_is(how):
    assert with_early_products(attention(**how)) == attention(**how)


def test_the_gradient_of_a_bias_is_done_with_that_of_its_filter():
    ops = [
        Op("Placeholder", (), (0,)),
        Op("Conv2D", (0,), (1,)),
        Op("ReluGrad", (1,), (2,)),
        Op("BiasAddGrad", (2,), (3,)),
        Op("Mul", (3,), (4,)),
        Op("Conv2DBackpropInput", (2,), (5,)),
        Op("Conv2DBackpropFilter", (0, 2), (6,)),
        Op("BiasAddGrad", (5,), (7,)),
    ]
    units = [Unit("conv", frozenset({"conv"}), 1, 2, range(0, 1))]
    step = TracedStep(ops, units, [Tensor(SIZE, number) for number in range(8)], (4, 6, 7))
    assert positions(step) == [0, 1, 2, 6, 6, 5, 6, 7]


def test_an_operation_takes_scratch_while_it_runs():
    step = chain(3)
    ops = [*step.ops[:-1], dataclasses.replace(step.ops[-1], scratch=3 * SIZE)]
    scratch = dataclasses.replace(step, ops=ops)
    *before, last = memory(step)
    assert memory(scratch) == [*before, last + 3 * SIZE]


def test_a_convolution_of_onednn_takes_more_than_its_tensors(monkeypatch):
    monkeypatch.setattr("tfscale.training.recompute.read.uses_onednn", lambda: True)
    model = keras.Sequential(
        [keras.Input((8, 8, 4)), keras.layers.DepthwiseConv2D(3), keras.layers.Conv2D(2, 3)]
    )
    model.compile("sgd", "mse")
    step = trace(model, (tf.TensorSpec([2, 8, 8, 4]), tf.TensorSpec([2, 4, 4, 2])))
    scratch = {op.kind: op.scratch for op in step.ops if op.scratch}
    wide, narrow = 9 * 4 * 4, 9 * 4 * 2 * 4
    assert scratch == {
        "DepthwiseConv2dNative": wide,
        "Conv2D": narrow,
        "Conv2DBackpropInput": narrow,
        "Conv2DBackpropFilter": narrow,
        "DepthwiseConv2dNativeBackpropInput": wide,
        "DepthwiseConv2dNativeBackpropFilter": 256 * wide,
    }
    assert step.convolutions == 6
    none = [dataclasses.replace(op, kind="Erfc") for op in step.ops]
    without = Plan(dataclasses.replace(step, ops=none), ())
    assert Plan(step, ()).up_to(0) == without.up_to(0) + 6 * KERNEL


def test_every_budget_is_kept_and_less_is_refused():
    step = chain(16)
    plain = Plan(step, ()).bound
    with pytest.raises(BudgetError, match=r"at least 1\d\.\d MB \(fraction=0\.\d+\)") as refusal:
        plan_budget(step, 2 * SIZE, solver="segments")
    assert refusal.value.plain == plain
    smallest = refusal.value.smallest
    overheads = []
    for budget in range(int(smallest), plain + SIZE, SIZE // 2):
        plan = plan_budget(step, budget, solver="segments")
        assert plan.peak < plan.bound <= budget
        assert plan.proven
        overheads.append(plan.overhead)
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 0


@pytest.mark.slow
def test_whoever_asks_for_the_moderate_budget_of_a_refusal_gets_a_moderate_plan(monkeypatch):
    step, solved = chain(40), budgets._solved

    def expensive(graph, limit, *rest):  # as after too short a search
        least = max(graph.working_set(number) for number in range(len(graph.nodes)))
        return solved(graph, min(limit, least + 2 * SIZE), *rest)

    monkeypatch.setattr(budgets, "_solved", expensive)
    monkeypatch.setattr(budgets, "_of_segments", lambda plain, effort: [])
    with pytest.raises(BudgetError) as refusal:
        plan_budget(step, 2 * SIZE, seconds=1)
    assert refusal.value.smallest < refusal.value.moderate
    assert plan_budget(step, refusal.value.moderate, seconds=1).overhead <= 0.5


def test_single_results_are_cheaper_than_segments_and_fit_where_these_do_not():
    step = chain(16)
    with pytest.raises(BudgetError) as refusal:
        plan_budget(step, 2 * SIZE, seconds=1)
    smallest = plan_budget(step, refusal.value.smallest, seconds=1)
    assert smallest.bound <= refusal.value.smallest
    with pytest.raises(BudgetError) as of_segments:
        plan_budget(step, refusal.value.smallest, solver="segments")
    assert of_segments.value.smallest > refusal.value.smallest
    for budget in (20 * SIZE, 23 * SIZE, 30 * SIZE):
        plan, segments = (
            plan_budget(step, budget, solver=s, seconds=20) for s in ("search", "segments")
        )
        assert plan.bound <= budget
        assert plan.rival == segments
        assert plan.overhead < 0.8 * segments.overhead
        assert f"most {plan.gap:.0%} of the overhead" in plan.summary() or plan.proven
        assert "of its operations" in plan.summary()


@pytest.mark.parametrize(("solver", "after"), [("auto", 1), ("search", 2), ("integer", 1)])
def test_ctrl_c_takes_the_best_plan_so_far(solver, after):
    told = []

    def better(overhead):
        told.append(overhead)
        if len(told) == after:
            signal.raise_signal(signal.SIGINT)

    plan = plan_budget(chain(40), 45 * SIZE, solver=solver, seconds=600, better=better)
    assert len(told) == after
    assert plan.bound <= 45 * SIZE
    assert plan.overhead == pytest.approx(told[-1])


def test_a_step_that_fit_traces_otherwise_gets_segments(caplog):
    step = dataclasses.replace(chain(16), followed=False)
    plan = plan_budget(step, 20 * SIZE, seconds=1)
    assert plan == plan_budget(step, 20 * SIZE, solver="segments")
    assert "chooses among whole segments of layers only: fit does not know" in caplog.text


def test_what_is_ready_runs_first():
    """Two results are computed again from two that are in memory, each by two operations."""
    ops = [
        *(Op("Placeholder", (), (0,)), Op("Placeholder", (), (1,))),
        *(Op("Exp", (0,), (2,)), Op("Tanh", (2,), (3,))),
        *(Op("Exp", (1,), (4,)), Op("Tanh", (4,), (5,))),
        *(Op("Loss", (3, 5), (6,)), Op("Backward", (6, 3, 5), (7,))),
    ]
    units = [Unit("all", frozenset({"all"}), 2, 6, range(0, 1))]
    step = TracedStep(ops, units, [Tensor(SIZE, number) for number in range(8)], (7,))
    again = Again((2, 3, 4, 5), frozenset({2, 3, 4, 5}), 7)
    copies = [one.op for one in moments_of(step, [again]) if one.version == 0]
    assert copies == [2, 4, 3, 5]


def test_another_trace_of_the_step_is_followed_or_gets_segments(caplog):
    step = chain(6)
    budget = 0.7 * Plan(step, ()).bound
    plan = plan_budget(step, budget, seconds=1)
    pieces = [Piece((unit.name,), unit.start, unit.stop) for unit in step.units]
    assert plan.events is not None
    assert plan.again_in(step, pieces) == plan.again
    other = chain(6, lasting={3})
    assert plan.again_in(other, pieces) == plan.rival.again_in(other, pieces) != ()
    assert "whole segments again, since fit traces the step with other operations" in caplog.text
    with pytest.raises(RuntimeError, match='solver="segments"'):
        dataclasses.replace(plan, segments=()).again_in(other, pieces)


def test_what_a_step_may_take_has_room_for_weights():
    """One more result, a weight that an update copies to twice its room, and 15 % wasted."""
    step = dataclasses.replace(chain(3), gradients=(0, 7))
    heavy = [Tensor(5 * SIZE if number == 7 else SIZE, number) for number in range(11)]
    step = dataclasses.replace(step, tensors=heavy)
    assert Plan(step, ()).up_to(30 * SIZE) == (30 + 5 + 2 * 5) * SIZE + (45 + 6) * SIZE * 15 // 100


def test_layers_by_name():
    plan = plan_layers(chain(6), ["l1", "l2", "l4"])
    assert plan.segments == (range(1, 3), range(4, 5))
    with pytest.raises(ValueError, match=r"no layer named 'l9'. It runs l0, l1"):
        plan_layers(chain(2), ["l9"])


def test_sqrt_keeps_the_last_segment():
    plan = plan_sqrt(chain(16))
    assert [len(segment) for segment in plan.segments] == [4, 4, 4]


def test_summary_says_what_will_be_done():
    text = plan_layers(chain(3), ["l0", "l1"]).summary()
    assert "l0" in text
    assert "again, segment 1" in text
    assert "kept" in text
    assert "a step takes up to 12.8 MB of 15.1 MB (85%), beside variables" in text
    assert "predicted overhead: 22%" in text


@pytest.mark.parametrize(
    ("budget", "planned", "said"),
    [
        (18 * SIZE, "planned: up to 17.4 MB", "budget: 18.0 MB"),
        (2000 * SIZE, "planned: up to 26.6 MB", "budget: 2.00 GB, more than plain takes"),
    ],
)
def test_draw(budget, planned, said):
    pytest.importorskip("matplotlib")
    plan = plan_budget(chain(8), budget)
    (axes,) = plan.draw().axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["plain: up to 26.6 MB", planned, said]
    plain, ours = (max(line.get_ydata()) for line in axes.get_lines()[:2])
    assert [plain, ours] == pytest.approx([26.6, plan.bound / 1e6])
    assert axes.get_ylim()[1] < 1.2 * plain
    assert f"budget: {plan.budget / 1e6:.1f} MB;" in plan.summary() or budget > 27 * SIZE


def test_the_refusal_and_the_plan_say_the_same_of_a_plain_step():
    step = chain(16)
    with pytest.raises(BudgetError) as refusal:
        plan_budget(step, 2 * SIZE, seconds=1)
    plan = plan_budget(step, refusal.value.smallest, seconds=1)
    (taken,) = re.findall(r"a step takes up to ([\d.]+ MB)", str(refusal.value))
    assert f"of {taken} (" in plan.summary()


@pytest.mark.slow
def test_a_refusal_asks_for_a_budget_that_does_not_take_several_times_as_long():
    step = chain(40)
    with pytest.raises(BudgetError) as refusal:
        plan_budget(step, 2 * SIZE, seconds=1)
    smallest, moderate = refusal.value.smallest, refusal.value.moderate
    assert smallest < moderate
    assert plan_budget(step, smallest, seconds=1).overhead > 0.5
    assert plan_budget(step, moderate, seconds=1).overhead <= 0.5
    said = str(refusal.value)
    assert f"at least {show(moderate, math.ceil)} (" in said
    assert f"; {show(smallest, math.ceil)} (" in said
    assert "takes several times as long" in said


def test_a_refusal_can_be_pickled():
    refusal = BudgetError(1e6, 3e6, 5e3, 4e6)
    again = pickle.loads(pickle.dumps(refusal))
    assert str(again) == str(refusal)
    assert vars(again) == vars(refusal)


def test_sizes_are_shown_in_units_that_fit():
    assert [show(size) for size in (5, 13144, 2.5e6, 3e9)] == [
        *("5 bytes", "13.1 kB", "2.5 MB", "3.00 GB")
    ]
