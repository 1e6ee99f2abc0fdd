"""Known orders of pipelines, each a pure function of stages and microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from tfscale.plan.pipelines.order import PipelineOrder
from tfscale.plan.pipelines.turns import Turn, Work
from tfscale.support import arguments

F, B, I, W = Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT  # noqa: E741


def gpipe(stages: int, microbatches: int) -> PipelineOrder:
    """Return GPipe's order: all forward passes, then all backward passes (Huang et al., 2019)."""
    _check(stages, microbatches)
    turns = (
        tuple(Turn(work, m, rank) for work in (F, B) for m in range(microbatches))
        for rank in range(stages)
    )
    return PipelineOrder("gpipe", stages, microbatches, tuple(turns))


def one_f_one_b(stages: int, microbatches: int) -> PipelineOrder:
    """Return 1F1B: a backward pass as soon as possible (PipeDream-flush, Narayanan et al., 2021).

    A rank keeps at most as many activations as there are stages from it to the end.
    """
    _check(stages, microbatches)
    turns = (
        tuple(
            Turn(work, m, rank)
            for work, m in _one_forward_one_backward(microbatches, stages - 1 - rank)
        )
        for rank in range(stages)
    )
    return PipelineOrder("1f1b", stages, microbatches, tuple(turns))


def interleaved(
    stages: int, microbatches: int, chunks: int, group: int | None = None
) -> PipelineOrder:
    """Return Megatron's interleaved order: each rank holds ``chunks`` stages, far apart.

    Args:
        stages: number of ranks.
        microbatches: number of microbatches.
        chunks: stages of the model per rank; the model is cut into ``stages * chunks`` stages.
        group: how many microbatches pass one chunk before a rank turns to the next chunk; at least
            ``stages``, which is the default.
    """
    _check(stages, microbatches)
    arguments.whole(chunks, "chunks", 1, what="a number of stages per rank")
    group = stages if group is None else group
    arguments.whole(group, "group", stages, what="a number of microbatches, one per rank or more")
    if microbatches > group and 0 < microbatches % group < stages:  # the ranks would deadlock
        expected = (
            f"a multiple of {group}, or so many that {stages} or more remain for the last group"
        )
        raise arguments.wrong(microbatches, "microbatches", expected)
    steps = list(interleaved_steps(microbatches, chunks, group))
    turns = []
    for rank in range(stages):
        ahead = 2 * (stages - 1 - rank) + (chunks - 1) * group
        ahead = stages - 1 - rank if chunks == 1 else ahead
        turns.append(
            tuple(
                Turn(F, steps[step][0], steps[step][1] * stages + rank)
                if work is F
                else Turn(B, steps[step][0], (chunks - 1 - steps[step][1]) * stages + rank)
                for work, step in _one_forward_one_backward(len(steps), ahead)
            )
        )
    return PipelineOrder("interleaved", stages * chunks, microbatches, tuple(turns))


def interleaved_steps(microbatches: int, chunks: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield the microbatch and the chunk of each forward step of an interleaved pipeline.

    Example:
        >>> microbatch, chunk = zip(*interleaved_steps(microbatches=5, chunks=2, group=3))
        >>> microbatch
        (0, 1, 2, 0, 1, 2, 3, 4, 3, 4)
        >>> chunk
        (0, 0, 0, 1, 1, 1, 0, 0, 1, 1)
    """
    for first in range(0, microbatches, group):
        for chunk in range(chunks):
            for microbatch in range(first, min(first + group, microbatches)):
                yield microbatch, chunk


def zero_bubble(stages: int, microbatches: int) -> PipelineOrder:
    """Return ZB-H1: 1F1B with the gradients of weights where a rank would wait (Qi et al., 2024).

    A rank r is r gradients of weights late, so it keeps as many activations as rank 0.
    """
    _check(stages, microbatches)
    return PipelineOrder(
        "zero bubble",
        stages,
        microbatches,
        tuple(tuple(_zero_bubble_of(rank, stages, microbatches)) for rank in range(stages)),
    )


def _zero_bubble_of(rank: int, stages: int, microbatches: int) -> Iterator[Turn]:
    late: list[int] = []
    forwards = 0
    for work, m in _one_forward_one_backward(microbatches, stages - 1 - rank):
        forwards += work is F
        yield Turn(F if work is F else I, m, rank)
        if work is B:
            late.append(m)
            if len(late) > rank or forwards == microbatches:
                yield Turn(W, late.pop(0), rank)
    for m in late:
        yield Turn(W, m, rank)


def _one_forward_one_backward(count: int, ahead: int) -> Iterator[tuple[Work, int]]:
    """Yield ``count`` forward and backward steps, forwards being ``ahead`` of backwards."""
    ahead = min(ahead, count)
    for step in range(ahead):
        yield F, step
    for step in range(count):
        if step + ahead < count:
            yield F, step + ahead
        yield B, step


def _check(stages: int, microbatches: int) -> None:
    arguments.whole(stages, "stages", 1, what="a number of stages")
    arguments.whole(microbatches, "microbatches", 1, what="a number of microbatches")
