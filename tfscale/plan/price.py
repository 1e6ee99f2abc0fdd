"""The price of one cut of a model on a cluster: seconds of a step, and bytes on each rank."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from tfscale.collectives import wires
from tfscale.collectives.choose import Chooser
from tfscale.collectives.cost import Machine, slowest
from tfscale.plan.cluster import Cluster
from tfscale.plan.formulas.grids import gather_seconds
from tfscale.plan.formulas.state import ADAM, SHARDS, Numbers, bytes_per_rank
from tfscale.plan.spreads import HEIGHT, Load, Row, Spread, cheapest, spreads_of
from tfscale.plan.units import Unit

ORDERS = ("1f1b", "zero bubble")


@dataclasses.dataclass(frozen=True)
class Cut:
    """The sizes of a cut of a model, and what is done to save memory.

    Args:
        rows: ranks that share each sample (model, tensor or domain parallelism).
        columns: parts into which a microbatch is cut (data parallelism).
        stages: stages of the pipeline.
        microbatches: parts of a batch that pass the pipeline one after another.
        order: order of the pipeline's work.
        shard: what the columns hold in shards: see ``formulas.state``.
        recompute: whether the backward pass computes activations again.
        wire: the format in which gradients are sent.
        lean: whether rows share units so that each rank holds little, not so that a step is short.
    """

    rows: int = 1
    columns: int = 1
    stages: int = 1
    microbatches: int = 1
    order: str = "1f1b"
    shard: str = "none"
    recompute: bool = False
    wire: str = "fp32"
    lean: bool = False

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.rows * self.columns * self.stages

    def __str__(self) -> str:
        parts = [f"data {self.columns}"]
        parts += [f"rows {self.rows}"] * (self.rows > 1)
        parts += [f"stages {self.stages}, {self.order}"] * (self.stages > 1)
        parts += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        zero = SHARDS.index(self.shard)
        parts += (
            [f"ZeRO-{zero}"] * (zero > 0) + ["recompute"] * self.recompute + ["lean"] * self.lean
        )
        return ", ".join([*parts, self.wire] if self.wire != "fp32" else parts)


@dataclasses.dataclass(frozen=True)
class Price:
    """The price of a cut.

    Args:
        cut: the cut.
        seconds: time of a step.
        parts: seconds by what they go to: ``compute``; ``row``, messages in rows; ``bubble``,
            waiting for other stages; ``sums``, gradients.
        memory: bytes on the fullest rank by what takes them: ``weights``, ``gradients``,
            ``state``, ``activations``, ``buffers``.
        spreads: for each unit the way in which a row shares it.
        ends: for each stage the number of the unit after its last one.
        algorithm: the schedule that sums gradients; empty if there is nothing to sum.
    """

    cut: Cut
    seconds: float
    parts: dict[str, float]
    memory: dict[str, float]
    spreads: tuple[str, ...]
    ends: tuple[int, ...]
    algorithm: str

    @property
    def bytes(self) -> float:
        """Bytes on the fullest rank."""
        return sum(self.memory.values())


class Pricer:
    """Prices cuts of one model on one cluster.

    Args:
        units: the model.
        batch: samples of a step.
        cluster: the machines.
        numbers: bytes of a parameter.
    """

    def __init__(
        self, units: Sequence[Unit], batch: int, cluster: Cluster, numbers: Numbers = ADAM
    ) -> None:
        self.units, self.batch, self.cluster, self.numbers = units, batch, cluster, numbers
        self._laid: dict[tuple[object, ...], list[Spread]] = {}

    # ------------------------------------------------------ the machine

    @functools.cached_property
    def _rates(self) -> tuple[float, float]:
        rates = self.cluster.rates
        return min(rates), sum(rates) / len(rates)

    def _row(self, cut: Cut) -> Row:
        least, mean = self._rates
        # Data parallelism alone gives each device samples in proportion to its rate.
        rate = mean if cut.rows == cut.stages == 1 else least
        link = slowest(self.cluster.machine(cut.rows, 1))
        samples = self.batch / (cut.columns * cut.microbatches)
        gather = lambda nbytes: gather_seconds(cut.rows, nbytes, link)  # noqa: E731
        halo = lambda nbytes: 2 * link.seconds(nbytes)  # noqa: E731
        return Row(cut.rows, samples, rate, gather, halo)

    def _sum(self, ranks: int, stride: int, parameters: float, wire: str) -> tuple[float, str]:
        """Return the seconds of a sum of gradients, and its schedule."""
        if ranks == 1 or not parameters:
            return 0, ""
        chooser = _chooser(self.cluster.machine(ranks, stride), ranks)
        choice = chooser.choose(wires.nbytes(wire, math.ceil(parameters)))
        return choice.seconds, choice.algorithm

    def _sum_slope(self, cut: Cut, everywhere: bool) -> float:
        """Return the least seconds per parameter that a large sum takes."""
        ranks = cut.columns * (cut.rows if everywhere else 1)
        large = 1e15  # so many that latency does not count
        seconds, _ = self._sum(ranks, 1 if everywhere else cut.rows, large, cut.wire)
        return seconds / large

    # ------------------------------------------------------ bounds

    def bound(self, cut: Cut) -> float:
        """Return a time that no cut of these sizes, in whatever shards and spreads, falls below.

        It takes for each unit the fastest spread, and the fewest gradients, as if a change of the
        state between units and the latency of sums were free.
        """
        row, weight = self._row(cut), _Weight(cut, self._slopes(cut))

        @functools.cache
        def least(unit: Unit) -> tuple[float, float]:
            loads = [row.load(unit, spread) for spread in spreads_of(unit, row)]
            times = [load.forward + load.backward for load in loads]
            return min(times), min(map(weight.slowest_stage, times, loads))

        found = [least(unit.signature) for unit in self.units]
        pairs = balanced([slowest_stage for _, slowest_stage in found], cut.stages)
        bottleneck = max(_by_stage([slowest_stage for _, slowest_stage in found], pairs))
        narrowest = [min(unit.outputs for unit in self.units)] * (cut.stages - 1)
        filling = self._filling(cut, row, narrowest)
        return weight.fill * sum(seconds for seconds, _ in found) + bottleneck + filling

    def _slopes(self, cut: Cut) -> tuple[float, float]:
        """Return the least seconds per parameter of sums over columns, and over all ranks."""
        large = 1e9
        over_columns, _ = self._sum(cut.columns, cut.rows, large, cut.wire)
        over_all, _ = self._sum(cut.columns * cut.rows, 1, large, cut.wire)
        return over_columns / large, over_all / large

    def _spreads(self, cut: Cut, row: Row, per_byte: float) -> list[Spread]:
        """Return the fastest spreads, or for seconds ``per_byte`` those that hold less."""
        key = (cut.rows, cut.columns, cut.stages, cut.microbatches, cut.order, cut.wire, per_byte)
        if key not in self._laid:
            weight = _Weight(cut, self._slopes(cut))

            def cost(load: Load) -> float:
                seconds = load.forward + load.backward
                held = self.numbers.total * (load.own + load.common) + load.kept
                mean = weight.slowest_stage(seconds, load) / cut.stages
                return weight.fill * seconds + mean + per_byte * held

            change = weight.fill + (cut.microbatches - weight.fill) / cut.stages
            self._laid[key] = cheapest(self.units, row, cost, change)
        return self._laid[key]

    # ------------------------------------------------------ prices

    def price(self, cut: Cut) -> Price | None:
        """Return the price of a cut; None if its rows share nothing but samples, as columns do.

        A step of 1F1B takes as long as one microbatch in all stages, and the others in the slowest
        stage; a zero bubble shortens the first part. ``pipelines.simulate`` gives the same for
        equal stages.
        """
        row = self._row(cut)
        spreads = self._spreads(cut, row, 1.0 if cut.lean else 0.0)
        if cut.rows > 1 and not any(spread.splits or spread is HEIGHT for spread in spreads):
            return None
        loads = [row.load(unit, spread) for unit, spread in zip(self.units, spreads)]
        times = self._times(cut, row, spreads, loads)
        weight = _Weight(cut, self._slopes(cut))
        ends = balanced(list(map(weight.slowest_stage, times, loads)), cut.stages)
        stages, sums = _by_stage(times, ends), self._sums(cut, loads, ends)
        work = [(cut.microbatches - weight.fill) * seconds for seconds in stages]
        last = max(range(cut.stages), key=lambda stage: work[stage] + sums[stage][0])
        edges = [self.units[end - 1].outputs for end in ends[:-1]]
        total = (
            weight.fill * sum(stages) + work[last] + sums[last][0] + self._filling(cut, row, edges)
        )
        busy = cut.microbatches * stages[last]
        compute = cut.microbatches * self._compute(cut, row, spreads, ends)[last]
        parts = {
            "compute": compute,
            "row": max(0.0, busy - compute),
            "bubble": max(0.0, total - busy - sums[last][0]),
            "sums": sums[last][0],
        }
        memory = self._memory(cut, loads, ends)
        names = tuple(spread.name for spread in spreads)
        return Price(cut, total, parts, memory, names, tuple(ends), sums[last][1])

    def _times(
        self, cut: Cut, row: Row, spreads: Sequence[Spread], loads: Sequence[Load]
    ) -> list[float]:
        """Return for each unit the seconds of a microbatch in both passes."""
        before, found = spreads[0].takes, []
        for unit, spread, load in zip(self.units, spreads, loads):
            changes = row.change(before, spread.takes, unit.inputs)
            again = load.forward + changes[0] if cut.recompute else 0
            found.append(load.forward + load.backward + sum(changes) + again)
            before = spread.gives
        return found

    def _filling(self, cut: Cut, row: Row, edges: Sequence[float]) -> float:
        """Return the seconds of one microbatch's messages between stages, there and back.

        Args:
            cut: the cut.
            row: its rows.
            edges: bytes of one sample that pass from each stage to the next.
        """
        link = slowest(self.cluster.machine(2, cut.rows * cut.columns))
        return sum(2 * link.seconds(nbytes * row.samples / cut.rows) for nbytes in edges)

    def _sums(
        self, cut: Cut, loads: Sequence[Load], ends: Sequence[int]
    ) -> list[tuple[float, str]]:
        """Return for each stage the seconds of its gradients' sums, and their schedule."""
        own = _by_stage([load.own for load in loads], ends)
        common = _by_stage([load.common for load in loads], ends)
        # Shards of weights: a reduce-scatter, and two all-gathers for each microbatch.
        factor = 0.5 + cut.microbatches if cut.shard == "all" else 1
        found = []
        for mine, shared in zip(own, common):
            first = self._sum(cut.columns, cut.rows, mine, cut.wire)
            second = self._sum(cut.columns * cut.rows, 1, shared, cut.wire)
            found.append((factor * (first[0] + second[0]), first[1] or second[1]))
        return found

    def _compute(
        self, cut: Cut, row: Row, spreads: Sequence[Spread], ends: Sequence[int]
    ) -> list[float]:
        """Return for each stage the seconds of a microbatch without messages."""
        work = [
            (unit.all_flops + cut.recompute * unit.flops) * (1 if spread.repeats else 1 / cut.rows)
            for unit, spread in zip(self.units, spreads)
        ]
        return [row.samples * flops / row.rate for flops in _by_stage(work, ends)]

    def _memory(self, cut: Cut, loads: Sequence[Load], ends: Sequence[int]) -> dict[str, float]:
        """Return the bytes on a rank of the fullest stage."""
        found = []
        for stage, (first, end) in enumerate(zip([0, *ends], ends)):
            held = loads[first:end]
            kept = [load.kept for load in held]
            live = min(cut.microbatches, cut.stages - (stage if cut.order == "1f1b" else 0))
            activations = live * sum(kept)
            if cut.recompute:
                activations = live * sum(load.entry for load in held) + max(kept)
            parameters = [load.own + load.common for load in held]
            gathered = self.numbers.weights * max(parameters) if cut.shard == "all" else 0
            memory = {
                name: bytes_per_rank(sum(parameters), cut.columns, cut.shard, numbers)
                for name, numbers in self.numbers.each().items()
            }
            found.append({**memory, "activations": activations, "buffers": gathered})
        return max(found, key=lambda one: sum(one.values()))


class _Weight:
    """Weights of a unit in the time of a step: once in the filling, often in its stage."""

    def __init__(self, cut: Cut, slopes: tuple[float, float]) -> None:
        # A zero bubble's first and last microbatch cost F + B - W, a third, instead of F + B + W.
        zero_bubble = cut.order == "zero bubble" and not cut.recompute
        self.fill = 0 if cut.stages == 1 else 1 / 3 if zero_bubble else 1
        self.often = cut.microbatches - self.fill
        self.slopes = slopes

    def slowest_stage(self, seconds: float, load: Load) -> float:
        """Return what a unit adds to the time of its stage."""
        return self.often * seconds + self.slopes[0] * load.own + self.slopes[1] * load.common


@functools.lru_cache(maxsize=256)
def _cached_chooser(key: str, ranks: int) -> Chooser:
    return Chooser(_MACHINES[key], 0, ranks)


_MACHINES: dict[str, Machine] = {}


def _chooser(machine: Machine, ranks: int) -> Chooser:
    key = repr(machine)
    _MACHINES.setdefault(key, machine)
    return _cached_chooser(key, ranks)


def _by_stage(values: Sequence[float], ends: Sequence[int]) -> list[float]:
    return [sum(values[first:end]) for first, end in zip([0, *ends], ends)]


def balanced(times: Sequence[float], stages: int) -> list[int]:
    """Return the ends of contiguous stages whose slowest one is as fast as possible.

    Example:
        >>> balanced([1, 1, 1, 3], stages=2)
        [3, 4]
    """
    if stages == 1:
        return [len(times)]
    total = np.concatenate([[0.0], np.cumsum(times)])
    between = total[None, :] - total[:, None]
    between[np.tril_indices(len(total))] = np.inf
    best = between[0]
    steps = []
    for _ in range(stages - 1):
        slowest_of = np.maximum(best[:, None], between)
        steps.append(slowest_of.argmin(axis=0))
        best = slowest_of.min(axis=0)
    ends = [len(times)]
    for step in reversed(steps):
        ends.insert(0, int(step[ends[0]]))
    return ends
