"""Pipelines: how a model is cut into stages, and in which order stages take microbatches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tfscale.plan import pipelines
from tfscale.plan.pipelines import PipelineOrder
from tfscale.support import arguments

OrderOf = Callable[[int, int], PipelineOrder]
ORDERS: Mapping[str, OrderOf] = {
    "gpipe": pipelines.gpipe,
    "1f1b": pipelines.one_f_one_b,
    "interleaved": lambda ranks, microbatches: pipelines.interleaved(ranks, microbatches, 2),
    "zero_bubble": pipelines.zero_bubble,
    "chimera": pipelines.chimera,
}

_EXPECTED = (
    f"one of {', '.join(map(repr, ORDERS))}; a function from a number of ranks and a number of "
    "microbatches to a PipelineOrder, such as tfscale.plan.pipelines.one_f_one_b; or a "
    "PipelineOrder"
)
_NOT_THE_SAME_STAGES = (
    "the order {name!r} gives rank {rank} the stages {own} and rank {other} the stages {theirs}. "
    "Ranks that share a stage must share all their stages, and each stage must be on equally many "
    "ranks. Let these ranks take turns in the same stages"
)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Cut of a model into stages, and the order in which stages take microbatches.

    Args:
        cuts: names of layers of the model, one for each stage but the first. A stage begins with
            its layer, and everything that needs the output of that layer is in this stage or in a
            later one. By default stages have about equally many parameters.
        microbatches: number of microbatches of a batch. More microbatches leave stages idle for a
            smaller part of the time.
        order: ``"gpipe"`` makes all forward passes, then all backward passes; ``"1f1b"`` makes
            each backward pass as soon as possible, and keeps fewer activations;
            ``"interleaved"`` gives each rank two stages, which are far apart; ``"zero_bubble"``
            computes gradients of weights where a rank would wait; ``"chimera"`` lets half of the
            microbatches run from the last rank to the first, so that each stage is on two ranks; or
            a function from a number of ranks and a number of microbatches to a ``PipelineOrder``,
            or such an order.

    Example:
        >>> pipeline = Pipeline(cuts=["block2"], microbatches=4)
        >>> print(*pipeline.order_of(ranks=2).turns[1], sep=", ")
        F0 of stage 1, B0 of stage 1, F1 of stage 1, B1 of stage 1, F2 of stage 1, B2 of stage 1, \
F3 of stage 1, B3 of stage 1
    """

    cuts: Sequence[str] | None = None
    microbatches: int = 4
    order: str | OrderOf | PipelineOrder = "1f1b"

    def __post_init__(self) -> None:
        if self.cuts is not None:
            expected = "a list of names of layers, one for each stage but the first, or None"
            arguments.items(self.cuts, "cuts", expected, arguments.text)
        arguments.whole(self.microbatches, "microbatches", least=1)
        named = isinstance(self.order, str) and self.order in ORDERS
        if not (named or isinstance(self.order, PipelineOrder) or callable(self.order)):
            raise arguments.wrong(self.order, "order", _EXPECTED)

    def described(self) -> str:
        """Return a text that is equal on all workers whose pipelines are equal."""
        order: Any = self.order
        name = order if isinstance(order, str) else getattr(order, "__name__", None) or order.name
        cuts = None if self.cuts is None else list(self.cuts)
        return f"Pipeline(cuts={cuts}, microbatches={self.microbatches}, order={name})"

    def order_of(self, ranks: int) -> PipelineOrder:
        """Return the verified order for a number of ranks.

        Raises:
            ValueError: the order does not fit the ranks, the microbatches or this version.
        """
        made: Any = (
            ORDERS.get(self.order, self.order) if isinstance(self.order, str) else self.order
        )
        order = made if isinstance(made, PipelineOrder) else made(ranks, self.microbatches)
        if not isinstance(order, PipelineOrder):
            raise arguments.wrong(order, "order", "a function that returns a PipelineOrder")
        if (order.ranks, order.microbatches) != (ranks, self.microbatches):
            raise ValueError(
                f"the order {order.name!r} is for {order.ranks} ranks and {order.microbatches} "
                f"microbatches, and the grid has {ranks} stages and microbatches is "
                f"{self.microbatches}. Change one of the two"
            )
        order.verify()
        parts_of_ranks(order)
        if order.stages - 1 not in _stages_of_ranks(order)[-1]:
            raise ValueError(f"the order {order.name!r} must put the last stage on the last rank")
        if self.cuts is not None and len(self.cuts) != order.stages - 1:
            raise ValueError(
                f"cuts={list(self.cuts)} makes {len(self.cuts) + 1} stages, and the order "
                f"{order.name!r} on {ranks} ranks has {order.stages}. Name "
                f"{order.stages - 1} layers"
            )
        return order


def parts_of_ranks(order: PipelineOrder) -> tuple[int, ...]:
    """Return for each rank the number of the part of the model that it holds: its stages.

    Two ranks that take microbatches in opposite directions hold the same part.

    Example:
        >>> parts_of_ranks(pipelines.one_f_one_b(4, 4)), parts_of_ranks(pipelines.chimera(4, 4))
        ((0, 1, 2, 3), (0, 1, 1, 0))

    Raises:
        ValueError: two ranks share some of their stages only.
    """
    stages = _stages_of_ranks(order)
    parts = list(dict.fromkeys(stages))
    for rank, own in enumerate(stages):
        for other, theirs in enumerate(stages):
            if own != theirs and (own & theirs or stages.count(own) != stages.count(theirs)):
                words = {"own": sorted(own), "other": other, "theirs": sorted(theirs)}
                raise ValueError(_NOT_THE_SAME_STAGES.format(name=order.name, rank=rank, **words))
    return tuple(map(parts.index, stages))


def _stages_of_ranks(order: PipelineOrder) -> list[frozenset[int]]:
    return [frozenset(turn.stage for turn in turns) for turns in order.turns]


def order_of_outputs(order: PipelineOrder) -> PipelineOrder:
    """Return the order in which ranks evaluate and predict, for ranks that train in another one.

    Outputs must come from one rank, in the order of rows.
    """
    has_last = [order.stages - 1 in stages for stages in _stages_of_ranks(order)]
    return order if sum(has_last) == 1 else pipelines.gpipe(order.ranks, order.microbatches)


# ------------------------------------------------------------------------- cuts


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a layer in a model.

    Args:
        name: name of the layer.
        needs: places of the calls whose outputs it gets.
        cost: number of parameters of the layer; 0 if an earlier call has the same layer.
    """

    name: str
    needs: tuple[int, ...] = ()
    cost: int = 0


def named_stages(calls: Sequence[Call], cuts: Sequence[str]) -> list[int]:
    """Return the stage of each call, where stages begin with these layers.

    Example:
        >>> calls = [Call("a"), Call("b", (0,)), Call("c", (1,)), Call("d", (0, 2))]
        >>> named_stages(calls, ["c"])
        [0, 0, 1, 1]
    """
    names = [call.name for call in calls]
    for cut in cuts:
        if cut not in names:
            raise ValueError(
                f"cuts names {cut!r}, and the model has no layer of this name. Its layers are "
                f"{', '.join(dict.fromkeys(names))}"
            )
    begins = {cut: stage for stage, cut in enumerate(cuts, 1)}
    stages: list[int] = []
    for call in calls:
        before = max((stages[i] for i in call.needs), default=0)
        stages.append(max(before, begins.get(call.name, 0)))
    empty = set(range(len(cuts) + 1)) - set(stages)
    wrong = [cut for cut, stage in begins.items() if stages[names.index(cut)] != stage]
    if empty or wrong:
        raise ValueError(
            f"cuts={list(cuts)} does not follow the model: a stage would be empty, or a layer "
            "would need a later stage. Name layers in the order in which the model calls them"
        )
    return stages


def balanced_stages(calls: Sequence[Call], stages: int) -> list[int]:
    """Return the stage of each call, so that the largest stage has as few parameters as possible.

    Example:
        >>> calls = [Call("a", cost=4), Call("b", (0,), 1), Call("c", (1,), 3), Call("d", (2,), 3)]
        >>> balanced_stages(calls, 2)
        [0, 0, 1, 1]
    """
    if len(calls) < stages:
        raise ValueError(
            f"the model has {len(calls)} layers, which cannot make {stages} stages. Take fewer "
            "stages"
        )
    # Layers without parameters cost time, too: they count as one parameter.
    sums = [0, *itertools.accumulate(call.cost + 1 for call in calls)]
    best: dict[int, tuple[int, list[int]]] = {end: (sums[end], []) for end in range(1, len(sums))}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(best[cut][0], sums[end] - sums[cut]), [*best[cut][1], cut])
                for cut in range(stage, end)
            )
            for end in range(stage + 1, len(sums))
        }
    cuts = best[len(calls)][1]
    return [sum(place >= cut for cut in cuts) for place in range(len(calls))]


def stages_beside(
    calls: Sequence[Call], allowed: Sequence[Collection[int]], stages: int
) -> list[int] | None:
    """Return the stage of each call, if other models have given stages to some layers.

    The largest stage has as few parameters as possible, and stages may be empty.

    Args:
        calls: the calls.
        allowed: for each call the stages that may make it.
        stages: number of stages.

    Returns:
        None if a call would need an earlier stage than one of those before it.

    Example:
        >>> calls = [Call("base", cost=9), Call("new", (0,), 4), Call("head", (1,), 1)]
        >>> stages_beside(calls, [[0], [0, 1], [0, 1]], 2)
        [0, 1, 1]
        >>> stages_beside(calls, [[1], [0, 1], [0]], 2)
    """
    costs = [call.cost + 1 for call in calls]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for stage in range(stages):
        found: dict[int, tuple[int, list[int]]] = {}
        for begin, (most, places) in best.items():
            own, end = 0, begin
            while True:
                one = (max(most, own), [*places, *[stage] * (end - begin)])
                found[end] = min(found.get(end, one), one)
                if end == len(calls) or stage not in allowed[end]:
                    break
                own, end = own + costs[end], end + 1
        best = found
    return best[len(calls)][1] if len(calls) in best else None


def crossing(
    needs: Sequence[tuple[int, Sequence[int]]], made: Mapping[int, int], stages: int
) -> list[list[int]]:
    """Return for each cut the tensors that cross it.

    Args:
        needs: for each call its stage, and the tensors that it needs.
        made: for each tensor the stage that makes it; tensors that all stages have are left out.
        stages: number of stages.

    Returns:
        A list with an entry for each stage but the last: what goes to the next stage.
    """
    last: dict[int, int] = {}
    for stage, tensors in needs:
        for tensor in tensors:
            if tensor in made:
                last[tensor] = max(stage, last.get(tensor, 0))
    return [
        [tensor for tensor, until in last.items() if made[tensor] <= cut < until]
        for cut in range(stages - 1)
    ]
