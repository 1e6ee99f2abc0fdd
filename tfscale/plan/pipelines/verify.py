"""Verification of a pipeline's order."""

from __future__ import annotations

import dataclasses
from collections import Counter
from fractions import Fraction

from tfscale.plan.pipelines.simulate import Times, simulate
from tfscale.plan.pipelines.turns import OrderError, Turn, Turns, Work

_PASSES = {
    frozenset({Work.FORWARD, Work.BACKWARD}),
    frozenset({Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT}),
}


@dataclasses.dataclass(frozen=True)
class Count:
    """Activations, weights and messages of an order, as the verifier has counted them.

    Args:
        live: for each rank the largest number of activations that it keeps at a time. An activation
            is kept from its forward pass until the gradient of the weights is made. One counts as
            much as the share of the model that one rank would hold if each held an equal part, so
            a stage of an interleaved pipeline counts 1 / chunks.
        held: for each rank the number of stages whose weights it holds.
        copies: the largest number of ranks that hold the same stage; their gradients are summed.
        versions: the number of versions of a stage's weights that a rank keeps: 1, because all
            orders end with all gradients of a batch, before the weights change.
        messages: number of messages between ranks.
    """

    live: tuple[int | Fraction, ...]
    held: tuple[int, ...]
    copies: int
    messages: int
    versions: int = 1


def verify(order: Turns) -> Count:
    """Prove that each microbatch passes each stage once, on one rank, in an order that ends.

    Raises:
        OrderError: the order misses work, repeats work, splits it between ranks, or never ends.

    Example:
        >>> from tfscale.plan import pipelines
        >>> pipelines.interleaved(stages=4, microbatches=8, chunks=2).verify().live[0]
        Fraction(11, 2)
    """
    _check_work(order)
    simulate(order, Times(1, 1, 1))  # raises if it never ends
    held = [{turn.stage for turn in turns} for turns in order.turns]
    holders = Counter(stage for stages in held for stage in stages)
    owners = order.owners()
    hops = sum(
        owners[microbatch, stage] != owners[microbatch, stage + 1]
        for microbatch, stage in owners
        if stage + 1 < order.stages
    )
    return Count(
        live=tuple(_most_live(order, turns) for turns in order.turns),
        held=tuple(len(stages) for stages in held),
        copies=max(holders.values()),
        messages=2 * hops,
    )


def _check_work(order: Turns) -> None:
    made: dict[tuple[int, int], dict[Work, int]] = {}
    for rank, turns in enumerate(order.turns):
        for turn in turns:
            works = made.setdefault((turn.microbatch, turn.stage), {})
            if turn.work in works:
                raise OrderError(f"{order.name} makes {turn} twice: on {works[turn.work]}, {rank}")
            _check_after_forward(order, works, turn, rank)
            works[turn.work] = rank
    for microbatch in range(order.microbatches):
        for stage in range(order.stages):
            works = made.pop((microbatch, stage), {})
            if frozenset(works) not in _PASSES:
                has = "".join(sorted(work.value for work in works)) or "nothing"
                raise OrderError(
                    f"{order.name} makes {has} of microbatch {microbatch} in stage {stage}; "
                    "it needs F and B, or F, I and W"
                )
    if made:
        microbatch, stage = min(made)
        raise OrderError(f"{order.name} has no microbatch {microbatch} or no stage {stage}")


def _check_after_forward(order: Turns, works: dict[Work, int], turn: Turn, rank: int) -> None:
    if turn.work is not Work.FORWARD and works.get(Work.FORWARD) != rank:
        raise OrderError(f"{order.name}: rank {rank} makes {turn} without its forward pass")
    if turn.work is Work.BACKWARD_WEIGHT and Work.BACKWARD_INPUT not in works:
        raise OrderError(f"{order.name}: rank {rank} makes {turn} before its backward-input turn")


def _most_live(order: Turns, turns: tuple[Turn, ...]) -> int | Fraction:
    live = most = 0
    for turn in turns:
        if turn.work is Work.FORWARD:
            live += 1
            most = max(most, live)
        elif turn.work is not Work.BACKWARD_INPUT:
            live -= 1
    unit = Fraction(order.ranks * most, order.stages)
    return int(unit) if unit.denominator == 1 else unit
