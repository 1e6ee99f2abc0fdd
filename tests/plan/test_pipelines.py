"""Pipelines' orders train, and take as long and hold as much as the papers' formulas say."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from tfscale.plan import pipelines
from tfscale.plan.pipelines import OrderError, PipelineOrder, Times, Transfer, Turn, Work

F, B = Work.FORWARD, Work.BACKWARD
SIZES = [(p, m) for p in range(1, 17) for m in range(1, 65)]


def any_times(p: int, m: int) -> Times:
    """Times that differ from size to size, and are the same in each run."""
    return Times(*(random.Random(100 * p + m).randint(1, 50) for _ in range(3)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [pipelines.gpipe, pipelines.one_f_one_b])
def test_bubble_of_gpipe_and_1f1b(make) -> None:
    for p, m in SIZES:
        times = any_times(p, m)
        ideal = m * (times.forward + times.backward)
        seen = pipelines.simulate(make(p, m), times)
        assert Fraction(seen.bubble, ideal) == Fraction(p - 1, m)
        assert set(seen.busy) == {ideal}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_bubble_of_interleaved(v: int) -> None:
    for p, m in SIZES:
        if m % p == 0:
            times = any_times(p, m)
            ideal = m * v * (times.forward + times.backward)
            seen = pipelines.simulate(pipelines.interleaved(p, m, v), times)
            assert Fraction(seen.bubble, ideal) == Fraction(p - 1, v * m)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 16, 48])
def test_live_activations(p: int, m: int) -> None:
    assert set(pipelines.gpipe(p, m).verify().live) == {m}
    assert pipelines.one_f_one_b(p, m).verify().live == tuple(min(p - r, m) for r in range(p))
    assert max(pipelines.zero_bubble(p, m).verify().live) == min(p, m)
    for v in (2, 3, 4):
        if m > p and m % p:
            continue
        live = pipelines.interleaved(p, m, v).verify().live
        assert max(live) <= p * (1 + Fraction(p - 1, p * v))
        if m % p == 0 and m > p:  # Korthikanti's factor over the p activations of 1F1B
            assert Fraction(max(live)) / p == 1 + Fraction(p - 1, p * v)


def test_megatrons_order_of_five_microbatches_in_groups_of_three() -> None:
    microbatches, chunks = zip(*pipelines.interleaved_steps(microbatches=5, chunks=2, group=3))
    assert microbatches == (0, 1, 2, 0, 1, 2, 3, 4, 3, 4)
    assert chunks == (0, 0, 0, 1, 1, 1, 0, 0, 1, 1)
    order = pipelines.interleaved(2, 5, 2, group=3)
    forwards = [turn for turn in order.turns[1] if turn.work is F]
    assert [turn.microbatch for turn in forwards] == list(microbatches)
    assert [turn.stage for turn in forwards] == [1 + 2 * chunk for chunk in chunks]
    assert order.verify().held == (2, 2)


@pytest.mark.parametrize("d", range(2, 17, 2))
def test_chimera(d: int) -> None:
    for n in range(d, 65, d):
        order = pipelines.chimera(d, n)
        seen = pipelines.simulate(order, Times(2, 1, 1))
        assert seen.seconds == 2 * (2 * n + d - 2)
        share = Fraction(d - 2, 2 * n + d - 2)
        assert seen.idle_share == pytest.approx(float(share), abs=1e-12)
        count = order.verify()
        assert max(count.live) == d
        assert (count.copies, set(count.held)) == (2, {2})


def test_chimera_of_four_waits_less_than_half_of_1f1b() -> None:
    equal = Times(2, 1, 1)
    assert pipelines.simulate(pipelines.chimera(4, 4), equal).idle_share == pytest.approx(0.20)
    share = pipelines.simulate(pipelines.one_f_one_b(4, 4), equal).idle_share
    assert share == pytest.approx(3 / 7)


def test_zero_bubble() -> None:
    """Check the paper's (p - 1) (F + B - W), for W no longer than B; a third of 1F1B if equal."""
    for p, m in SIZES:
        if m < p:
            continue
        f, b, w = dataclasses.astuple(any_times(p, m))[:3]
        b, w = max(b, w), min(b, w)
        seen = pipelines.simulate(pipelines.zero_bubble(p, m), Times(f, b, w))
        assert seen.bubble == (p - 1) * (f + b - w)
        if m % 16 == 0:
            equal = [
                pipelines.simulate(make(p, m), Times(1, 1, 1)).bubble
                for make in (pipelines.one_f_one_b, pipelines.zero_bubble)
            ]
            assert equal == [3 * (p - 1), p - 1]


@pytest.mark.parametrize("p", range(2, 17, 2))
def test_dualpipe(p: int) -> None:
    """Check the README's table: (PP/2 - 1) (F&B + B - 3W), PP + 1 activations, two copies."""
    for m in (2 * p, 2 * p + 2, 3 * p + p % 2, 64):
        if m < 2 * p:
            continue
        order = pipelines.dualpipe(p, m)
        for f, w, overlap in ((1, 1, 0), (3, 2, 1), (5, 5, 4), (7, 3, 2)):
            together = 2 * f + w - overlap
            seen = pipelines.simulate(order, Times(f, f, w, together=together))
            assert seen.bubble == (p // 2 - 1) * (together + (f + w) - 3 * w)
        count = order.verify()
        assert (max(count.live), count.copies, set(count.held)) == (p + 1, 2, {2})


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 4), st.integers(0, 3))
def test_every_order_trains(p: int, m: int, v: int, more: int) -> None:
    """Check also fewer microbatches than stages, uneven groups, and that messages pair up."""
    orders = [pipelines.gpipe(p, m), pipelines.one_f_one_b(p, m), pipelines.zero_bubble(p, m)]
    if m <= p + more or not 0 < m % (p + more) < p:
        orders.append(pipelines.interleaved(p, m, v, group=p + more))
    orders.append(pipelines.chimera(2 * p, 2 * m))
    if m >= 2 * p:
        orders.append(pipelines.dualpipe(2 * p, 2 * m))
    for order in orders:
        count = order.verify()
        programs = [list(order.program(rank)) for rank in range(order.ranks)]
        sent, received = (
            sorted(
                (
                    one.turn.work.value,
                    one.turn.microbatch,
                    one.turn.stage,
                    *sorted((rank, one.peer)),
                )
                for rank, program in enumerate(programs)
                for one in program
                if isinstance(one, Transfer) and one.sends is sends
            )
            for sends in (True, False)
        )
        # A gradient is sent by a whole or a split backward pass; its receiver names its own.
        assert [one[1:] for one in sorted(sent, key=lambda one: (one[0] == "F", *one[1:]))] == [
            one[1:] for one in sorted(received, key=lambda one: (one[0] == "F", *one[1:]))
        ]
        assert len(sent) == count.messages


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 12), st.data())
def test_time_is_at_least_the_busiest_rank_and_the_longest_way(p: int, m: int, data) -> None:
    shares = data.draw(st.lists(st.integers(1, 9), min_size=p, max_size=p))
    transfer = data.draw(st.integers(0, 5))
    times = Times(2, 3, 1, transfer=transfer, shares=shares)
    for make in (pipelines.gpipe, pipelines.one_f_one_b, pipelines.zero_bubble):
        seen = pipelines.simulate(make(p, m), times)
        assert seen.seconds >= max(seen.busy) == 6 * m * max(shares)
        assert seen.seconds >= 5 * sum(shares) + 2 * transfer * (p - 1)


def change(order: PipelineOrder, rank: int, turns: tuple[Turn, ...]) -> PipelineOrder:
    changed = (*order.turns[:rank], turns, *order.turns[rank + 1 :])
    return dataclasses.replace(order, turns=changed)


GOOD = pipelines.one_f_one_b(2, 3)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (change(GOOD, 0, GOOD.turns[0][:-1]), "makes F of microbatch 2 in stage 0; it needs"),
        (change(GOOD, 0, (*GOOD.turns[0], GOOD.turns[0][-1])), "B2 of stage 0 twice"),
        (change(GOOD, 0, GOOD.turns[0][::-1]), "rank 0 makes B2 of stage 0 without its forward"),
        (change(GOOD, 0, (*GOOD.turns[0], Turn(F, 7, 0))), "no microbatch 7"),
        (
            change(
                GOOD, 0, (Turn(F, 0, 0), Turn(B, 0, 0), *GOOD.turns[0][1:2], *GOOD.turns[0][3:])
            ),
            None,
        ),
        (
            change(
                GOOD, 1, tuple(sorted(GOOD.turns[1], key=lambda t: (t.work is B, -t.microbatch)))
            ),
            "never ends: rank 0 at B0 of stage 0, rank 1 at F2 of stage 1",
        ),
    ],
)
def test_the_verifier_finds(broken: PipelineOrder, words: str | None) -> None:
    if words is None:  # slower, but it trains
        broken.verify()
    else:
        with pytest.raises(OrderError, match=words):
            broken.verify()


def test_an_interleaved_order_that_would_deadlock_is_refused() -> None:
    with pytest.raises(ValueError, match="microbatches is a multiple of 4, or .* 4 or more.*got 5"):
        pipelines.interleaved(4, 5, 3)


@pytest.mark.parametrize("make", [pipelines.chimera, pipelines.dualpipe])
def test_odd_numbers_are_refused(make) -> None:
    with pytest.raises(ValueError, match="stages is an even number, because half.*got 3"):
        make(3, 16)
    with pytest.raises(ValueError, match="microbatches is an even number.*got 17"):
        make(4, 17)


def test_a_program_receives_before_and_sends_after() -> None:
    words = [str(action) for action in pipelines.gpipe(2, 1).program(1)]
    assert words == [
        "receive F0 of stage 0 from rank 0", "F0 of stage 1", "B0 of stage 1",
        "send B0 of stage 1 to rank 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "order",
    [pipelines.one_f_one_b(4, 8), pipelines.dualpipe(4, 8), pipelines.zero_bubble(3, 6)],
    ids=lambda order: order.name,
)
def test_a_picture_has_a_box_per_turn(order: PipelineOrder) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = order.draw().axes
    assert len(axes.patches) == sum(map(len, order.turns)) == len(axes.texts)
    assert order.name in axes.get_title(loc="left")
