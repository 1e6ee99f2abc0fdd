"""Spreads: how the ranks of one row of a grid share a unit, and what each spread costs.

A row of ``rows`` ranks works on the same samples. Activations between units are in one of these
states: ``parted``, each rank holds some of the samples; ``whole``, each rank holds all; ``split``,
each rank holds some of the channels; ``tokens``, each rank holds some tokens of each sample;
``high``, each rank holds some of the height of images. The 1.5D algorithm of SPAA 2018 is
``columns`` followed by a change from split to whole, Megatron's perceptron ``columns`` followed by
``rows``, and a convolution in domains is ``height``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfscale.plan.units import Unit

Gather = Callable[[float], float]  # seconds of an all-gather of so many bytes, in a row


class Spread(NamedTuple):
    """A way in which a row shares a unit.

    Attributes:
        name: name of the spread.
        takes: state of the activations before the unit.
        gives: state of the activations after it.
        splits: whether each rank holds a part of the weights.
        repeats: whether each rank does all work of the row's samples.
        forward: number of all-reduces of the outputs in the forward pass.
        backward: number of all-reduces of the inputs' gradients in the backward pass.
    """

    name: str
    takes: str
    gives: str
    splits: bool = False
    repeats: bool = False
    forward: int = 0
    backward: int = 0


SAMPLES = Spread("samples", "parted", "parted")
COPIES = Spread("copies", "whole", "whole", repeats=True)
COLUMNS = Spread("columns", "whole", "split", splits=True, backward=1)
ROWS = Spread("rows", "split", "whole", splits=True, forward=1)
VOCABULARY = Spread("vocabulary", "whole", "whole", splits=True, forward=1)
HEIGHT = Spread("height", "high", "high")
EXPERTS = Spread("experts", "parted", "parted", splits=True)
CHANNELS = Spread("channels", "split", "split")
TOKENS = Spread("tokens", "tokens", "tokens")


def _pair(name: str, state: str, sums: int) -> Spread:
    return Spread(name, state, state, splits=True, forward=sums, backward=sums)


def spreads_of(unit: Unit, row: Row) -> tuple[Spread, ...]:
    """Return the ways in which a row of ranks can share a unit."""
    every = _spreads_of(unit, row.rows > 1, row.samples >= row.rows)
    if not row.runnable or row.rows == 1:
        return every
    return tuple(spread for spread in every if _runs(spread, unit))


def _runs(spread: Spread, unit: Unit) -> bool:
    """Return whether ``ScaleStrategy`` shares a unit in this way: by rules for its weights."""
    return spread in (COPIES, CHANNELS) or (
        spread.name in ("columns", "rows", "heads", "vocabulary") and bool(unit.cuts)
    )


@functools.cache
def _spreads_of(unit: Unit, several: bool, enough: bool) -> tuple[Spread, ...]:
    if not several:
        return (SAMPLES,)
    always = (SAMPLES, COPIES) if enough else (COPIES,)
    if unit.kind in ("dense", "conv"):
        return (*always, COLUMNS, ROWS, *((HEIGHT,) if unit.halo is not None else ()))
    if unit.kind == "pair":
        # An all-gather and a reduce-scatter instead of each all-reduce: sequence parallelism.
        return (
            *always,
            _pair("heads", "whole", unit.pairs),
            _pair("sequence", "tokens", unit.pairs),
        )
    if unit.kind == "experts":
        return (*always, *((EXPERTS,) if enough else ()))
    if unit.kind == "embedding":
        return (*always, VOCABULARY)
    if unit.kind == "norm":
        return (*always, TOKENS)
    return (*always, *((CHANNELS, TOKENS, HEIGHT) if unit.kind == "plain" else ()))


@dataclasses.dataclass(frozen=True)
class Load:
    """The work and the memory of one rank for one unit.

    Args:
        forward: seconds of the forward pass of a microbatch, messages of the row included.
        backward: seconds of the backward pass.
        own: number of weights whose gradients are summed over the columns of the grid.
        common: number of weights whose gradients are summed over all ranks of the grid.
        kept: bytes that a microbatch keeps for the backward pass.
        entry: bytes of the unit's inputs, which recomputation keeps.
    """

    forward: float
    backward: float
    own: float
    common: float
    kept: float
    entry: float


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of ranks that shares units.

    Args:
        rows: number of ranks.
        samples: samples of a microbatch that the row works on.
        rate: operations per second of a rank.
        gather: seconds of an all-gather in the row; an all-reduce takes twice as long.
        halo: seconds of a message to a neighbour in the row.
        runnable: whether ranks share units only as ``ScaleStrategy`` does.
        launch: seconds that a pass of a unit takes at least, beside its operations.
    """

    rows: int
    samples: float
    rate: float
    gather: Gather
    halo: Gather
    runnable: bool = False
    launch: float = 0.0

    def load(self, unit: Unit, spread: Spread) -> Load:
        """Return what a rank does for a unit in a spread."""
        assert unit.backward_flops is not None and unit.kept is not None
        share = self.samples if spread.repeats else self.samples / self.rows
        forward, backward = (
            flops * share / self.rate + self.launch for flops in (unit.flops, unit.backward_flops)
        )
        forward += 2 * spread.forward * self.gather(self.samples * unit.outputs)
        backward += 2 * spread.backward * self.gather(self.samples * unit.inputs)
        if spread is HEIGHT and unit.halo is not None:
            forward += self.halo(self.samples * unit.halo[0])
            backward += self.halo(self.samples * unit.halo[1])
        if spread is EXPERTS:  # an all-to-all to the experts, and one back, in each pass
            moved = 2 * self.gather(self.samples * unit.routed / self.rows)
            forward, backward = forward + moved, backward + moved
        entry = unit.inputs * (self.samples if spread.takes == "whole" else share)
        inside = max(unit.kept - unit.inputs, 0) * share
        kept = inside + min(unit.kept, unit.inputs) * (entry / unit.inputs if unit.inputs else 0)
        weights = unit.parameters / (self.rows if spread.splits else 1)
        sums_over_columns = spread.splits or spread.repeats
        own, common = (weights, 0.0) if sums_over_columns else (0.0, weights)
        return Load(forward, backward, own, common, kept, entry)

    def change(self, before: str, after: str, nbytes: float) -> tuple[float, float]:
        """Return the forward and backward seconds to bring activations into another state.

        Args:
            before: state after a unit.
            after: state before the next one.
            nbytes: bytes of one sample's activations.
        """
        if before == after or self.rows == 1:
            return 0, 0
        whole = self.gather(self.samples * nbytes)
        if after == "whole":
            return whole, 0  # backward each rank takes its part of the gradient
        if before == "whole":
            return 0, whole
        moved = self.gather(self.samples * nbytes / self.rows)  # all-to-all
        return moved, moved


def cheapest(
    units: Sequence[Unit], row: Row, cost: Callable[[Load], float], change_weight: float
) -> list[Spread]:
    """Return the spreads of the least total cost: a dynamic program over states.

    Args:
        units: the units.
        row: the row that shares them.
        cost: the cost of a unit's load.
        change_weight: factor from seconds of a change between states to its cost.
    """
    of = functools.cache(lambda unit, spread: cost(row.load(unit, spread)))
    turn = functools.cache(lambda *change: change_weight * sum(row.change(*change)))
    totals = {"any": 0.0}  # data are read in the state that the first unit takes
    steps: list[dict[str, tuple[Spread, str]]] = []
    for unit in units:
        kind, found, came = unit.signature, dict[str, float](), dict[str, tuple[Spread, str]]()
        for spread in spreads_of(kind, row):
            changed = [
                (total + (turn(state, spread.takes, kind.inputs) if steps else 0), state)
                for state, total in totals.items()
            ]
            total, before = min(changed)
            total += of(kind, spread)
            if total < found.get(spread.gives, float("inf")):
                found[spread.gives], came[spread.gives] = total, (spread, before)
        totals = found
        steps.append(came)
    state = min(totals, key=lambda one: totals[one])
    chosen: list[Spread] = []
    for came in reversed(steps):
        spread, state = came[state]
        chosen.insert(0, spread)
    return chosen
