"""The price of one cut of a model on a cluster: seconds of a step, and bytes on each rank."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfscale.collectives import wires
from tfscale.collectives.choose import Chooser
from tfscale.collectives.cost import Machine
from tfscale.plan.cluster import Cluster
from tfscale.plan.cut import Cut, Price
from tfscale.plan.formulas.grids import gather_seconds
from tfscale.plan.formulas.state import ADAM, Numbers, bytes_per_rank
from tfscale.plan.spreads import HEIGHT, Load, Row, Spread, cheapest, spreads_of
from tfscale.plan.units import Unit


class Pricer:
    """Prices cuts of one model on one cluster.

    Args:
        units: the model.
        batch: samples of a step.
        cluster: the machines.
        numbers: bytes of a parameter.
        runnable: whether rows share units only as ``ScaleStrategy`` does.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        batch: int,
        cluster: Cluster,
        numbers: Numbers = ADAM,
        runnable: bool = False,
    ) -> None:
        self.units, self.batch, self.cluster, self.numbers = units, batch, cluster, numbers
        self._runnable = runnable
        self._laid: dict[tuple[Cut, float], list[Spread]] = {}
        self._leasts: dict[Cut, tuple[list[float], list[float]]] = {}

    # ------------------------------------------------------ the machine

    @functools.cached_property
    def _mean_rate(self) -> float:
        return sum(self.cluster.rates) / len(self.cluster.rates)

    def _row(self, cut: Cut) -> Row:
        worst = self.cluster.worst
        # Data parallelism alone gives each device samples in proportion to its rate.
        rate = self._mean_rate if cut.rows == cut.stages == 1 else worst.rate
        link = self.cluster.slowest(cut.rows, 1)
        samples = self.batch / (cut.columns * cut.microbatches)
        gather = lambda nbytes: gather_seconds(cut.rows, nbytes, link)  # noqa: E731
        halo = lambda nbytes: 2 * link.seconds(nbytes)  # noqa: E731
        return Row(cut.rows, samples, rate, gather, halo, self._runnable, worst.launch)

    def _sum(self, ranks: int, stride: int, parameters: float, wire: str) -> tuple[float, str]:
        """Return the seconds of a sum of gradients, and its schedule."""
        if ranks == 1 or not parameters:
            return 0, ""
        nbytes = wires.nbytes(wire, math.ceil(parameters))
        machines = self.cluster.machines(ranks, stride)
        choices = [_chooser(one, self.cluster.gamma, ranks).choose(nbytes) for one in machines]
        choice = min(choices, key=lambda one: one.seconds)
        return choice.seconds, choice.algorithm

    def _strides(self, cut: Cut) -> _Strides:
        """Return how far the ranks of each team stand from each other.

        Ranks of a row are neighbours. ``ScaleStrategy`` puts the stages of a model next to each
        other; a plan that need not run puts stages far apart, for they send least.
        """
        if self._runnable:
            return _Strides(cut.rows * cut.stages, cut.rows, cut.stages)
        return _Strides(cut.rows, cut.rows * cut.columns, 1)

    def _speeds(self, cut: Cut) -> list[float]:
        """Return the rate of each rank of a pipeline, in rates of the slowest device.

        A stage is as fast as the slowest of the devices that hold it.
        """
        least = self.cluster.worst.rate
        if cut.stages == 1 or max(self.cluster.rates) == least:
            return [1.0] * cut.stages
        rates = np.array(self.cluster.rates[: cut.ranks]) / least
        if self._runnable:
            slowest = rates.reshape(cut.columns, cut.stages, cut.rows).min(axis=(0, 2))
        else:
            slowest = rates.reshape(cut.stages, -1).min(axis=1)
        return [float(speed) for speed in slowest]

    # ------------------------------------------------------ bounds

    def bound(self, cut: Cut) -> float:
        """Return a time that no cut of these sizes, in whatever shards and spreads, falls below.

        It takes for each unit the fastest spread, and the fewest gradients, as if a change of the
        state between units and the latency of sums were free.
        """
        row, weight = self._row(cut), _Weight(cut, self._slopes(cut))
        times, weights = self._least(cut)
        bottleneck = max(self._by_stage(cut, weights, self._ends(cut, weights)))
        narrowest = [min(unit.outputs for unit in self.units)] * (cut.stages - 1)
        filling = self._filling(cut, row, narrowest)
        parameters = sum(unit.parameters for unit in self.units)
        update = self.cluster.step + self.cluster.worst.update * parameters / cut.ranks
        return weight.fill * sum(times) / max(self._speeds(cut)) + bottleneck + filling + update

    def _least(self, cut: Cut) -> tuple[list[float], list[float]]:
        """Return for each unit the least seconds of a microbatch, and the least weight in a stage.

        Each is that of the fastest spread.
        """
        key = _sizes_of(cut)
        if key in self._leasts:
            return self._leasts[key]
        row, weight = self._row(cut), _Weight(cut, self._slopes(cut))

        @functools.cache
        def least(unit: Unit) -> tuple[float, float]:
            loads = [row.load(unit, spread) for spread in spreads_of(unit, row)]
            times = [load.forward + load.backward for load in loads]
            return min(times), min(map(weight.slowest_stage, times, loads))

        found = [least(unit.signature) for unit in self.units]
        self._leasts[key] = [seconds for seconds, _ in found], [stage for _, stage in found]
        return self._leasts[key]

    def _ends(self, cut: Cut, weights: Sequence[float]) -> list[int]:
        """Return the ends of the stages whose slowest one is as fast as possible.

        If a rank has several stages, their balance says little of the ranks' balance. So the search
        does not look for the best ends then, and takes those of the least weights.
        """
        if cut.chunks > 1:
            weights = self._least(cut)[1]
        return balanced(weights, cut.stages * cut.chunks, self._speeds(cut) * cut.chunks)

    def _slopes(self, cut: Cut) -> tuple[float, float]:
        """Return the least seconds per parameter of sums over columns, and over all ranks."""
        large = 1e9
        strides = self._strides(cut)
        over_columns, _ = self._sum(cut.columns, strides.columns, large, cut.wire)
        over_all, _ = self._sum(cut.columns * cut.rows, strides.both, large, cut.wire)
        return over_columns / large, over_all / large

    def _spreads(self, cut: Cut, row: Row, per_byte: float) -> list[Spread]:
        """Return the fastest spreads, or for seconds ``per_byte`` those that hold less."""
        key = (_sizes_of(cut), per_byte)
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
        ends = self._ends(cut, list(map(weight.slowest_stage, times, loads)))
        stages, sums = self._by_stage(cut, times, ends), self._sums(cut, loads, ends)
        work = [(cut.microbatches - weight.fill) * seconds for seconds in stages]
        last = max(range(cut.stages), key=lambda stage: work[stage] + sums[stage][0])
        edges = [self.units[end - 1].outputs for end in ends[:-1]]
        total = (
            weight.fill * sum(stages) + work[last] + sums[last][0] + self._filling(cut, row, edges)
        )
        busy = cut.microbatches * stages[last]
        compute = cut.microbatches * self._compute(cut, row, spreads, ends)[last]
        update = self._update(cut, loads, ends)
        parts = {
            "compute": compute,
            "row": max(0.0, busy - compute),
            "bubble": max(0.0, total - busy - sums[last][0]),
            "sums": sums[last][0],
            "update": update,
        }
        memory = self._memory(cut, loads, ends)
        names = tuple(spread.name for spread in spreads)
        return Price(cut, total + update, parts, memory, names, tuple(ends), sums[last][1])

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
        link = self.cluster.slowest(2, self._strides(cut).stages)
        return sum(2 * link.seconds(nbytes * row.samples / cut.rows) for nbytes in edges)

    def _sums(
        self, cut: Cut, loads: Sequence[Load], ends: Sequence[int]
    ) -> list[tuple[float, str]]:
        """Return for each rank of the pipeline the seconds of its sums, and their schedule."""
        own = _by_rank([load.own for load in loads], ends, cut.stages)
        common = _by_rank([load.common for load in loads], ends, cut.stages)
        # Shards of weights: a reduce-scatter, and two all-gathers for each microbatch.
        factor = 0.5 + cut.microbatches if cut.shard == "all" else 1
        found = []
        for mine, shared in zip(own, common):
            first = self._sum_in_turns(cut, mine, everywhere=False)
            second = self._sum_in_turns(cut, shared, everywhere=True)
            seconds = factor * (first[0] + second[0]) + self._carried(cut, mine + shared)
            sent = mine * (cut.columns > 1) + shared * (cut.columns * cut.rows > 1)
            seconds += self.cluster.worst.pack * sent * (1 if cut.shard == "none" else 1.5)
            found.append((seconds, first[1] or second[1]))
        return found

    def _sum_in_turns(self, cut: Cut, parameters: float, everywhere: bool) -> tuple[float, str]:
        """Return the seconds of a step's sum, and its schedule.

        In rounds, ranks sum over those that are near in each step, and over all others by turns.

        Args:
            cut: the cut.
            parameters: number of gradients.
            everywhere: whether the sum is over the ranks of rows, too, and not over columns only.
        """
        strides = self._strides(cut)
        rows, stride = (cut.rows, strides.both) if everywhere else (1, strides.columns)
        if cut.every == 1:
            return self._sum(cut.columns * rows, stride, parameters, cut.wire)
        near = self.near(cut)
        inner = self._sum(near * rows, stride, parameters, cut.wire)
        outer = self._sum(cut.columns // near, strides.columns * near, parameters, cut.wire)
        return inner[0] + outer[0] / cut.every, inner[1] or outer[1]

    def near(self, cut: Cut) -> int:
        """Return how many columns of a cut are near each other: in one host, or in one rack."""
        racks = self.cluster.racks
        devices = self.cluster.width * (1 if racks is None else racks.hosts)
        return math.gcd(max(1, devices // self._strides(cut).columns), cut.columns)

    def _carried(self, cut: Cut, parameters: float) -> float:
        """Return the seconds in which a rank's gradients and weights pass the bus of its host.

        This is ZeRO-Infinity's efficiency: compute over efficiency is compute plus these seconds.
        """
        if not cut.offload:
            return 0
        held = parameters / (1 if cut.shard == "none" else cut.columns)
        return held * (self.numbers.gradients + self.numbers.weights) / self.cluster.worst.bus

    def _update(self, cut: Cut, loads: Sequence[Load], ends: Sequence[int]) -> float:
        """Return the seconds in which the rank with the most parameters adds gradients and updates.

        Gradients of microbatches are added up, which reads and writes about half as many numbers as
        the update of a usual optimizer.
        """
        held = max(_by_rank([load.own + load.common for load in loads], ends, cut.stages))
        share = cut.columns if cut.shard != "none" else 1
        updates = 1 / share + (cut.microbatches - 1) / 2
        return self.cluster.step + self.cluster.worst.update * held * updates

    def _compute(
        self, cut: Cut, row: Row, spreads: Sequence[Spread], ends: Sequence[int]
    ) -> list[float]:
        """Return for each rank of the pipeline the seconds of a microbatch without messages."""
        work = [
            row.samples * (unit.all_flops + cut.recompute * unit.flops) / row.rate
            * (1 if spread.repeats else 1 / cut.rows)
            + (2 + cut.recompute) * row.launch
            for unit, spread in zip(self.units, spreads)
        ]  # fmt: skip
        return self._by_stage(cut, work, ends)

    def _by_stage(self, cut: Cut, times: Sequence[float], ends: Sequence[int]) -> list[float]:
        """Return the seconds of each rank of the pipeline, by its own devices' rate."""
        seconds = _by_rank(times, ends, cut.stages)
        return [one / speed for one, speed in zip(seconds, self._speeds(cut))]

    def _memory(self, cut: Cut, loads: Sequence[Load], ends: Sequence[int]) -> dict[str, float]:
        """Return the bytes on the fullest rank."""
        ranges = list(zip([0, *ends], ends))
        found = []
        for stage in range(cut.stages):
            held = [load for a, b in ranges[stage :: cut.stages] for load in loads[a:b]]
            kept, live = [load.kept for load in held], self._live(cut, stage)
            activations = live * sum(kept)
            if cut.recompute:
                activations = live * sum(load.entry for load in held) + max(kept)
            each = [load.own + load.common for load in held]
            gathered = self.numbers.weights * max(each) if cut.shard == "all" else 0
            memory = {
                name: bytes_per_rank(sum(each), cut.columns, cut.shard, numbers)
                for name, numbers in self.numbers.each().items()
            }
            if cut.offload:
                memory["state"] = 0.0
            if cut.every > 1:  # weights at the last agreement, and an outer momentum
                memory["state"] += 2 * self.numbers.weights * sum(each)
            found.append({**memory, "activations": activations, "buffers": gathered})
        return max(found, key=lambda one: sum(one.values()))

    def _live(self, cut: Cut, stage: int) -> float:
        """Return of how many microbatches a rank keeps activations."""
        if cut.order == "interleaved":
            factor = 1 + (cut.stages - 1) / (cut.stages * cut.chunks)  # Korthikanti et al.
            return min(cut.microbatches, cut.stages * factor)
        return min(cut.microbatches, cut.stages - (stage if cut.order == "1f1b" else 0))


def _sizes_of(cut: Cut) -> Cut:
    """Return a cut without what saves memory."""
    return dataclasses.replace(cut, shard="none", recompute=False, lean=False, offload=False)


class _Strides(NamedTuple):
    """Distances between two members of a team, in ranks.

    Attributes:
        columns: between two columns.
        stages: between two stages.
        both: between two ranks of all columns and rows.
    """

    columns: int
    stages: int
    both: int


class _Weight:
    """Weights of a unit in the time of a step: once in the filling, often in its stage."""

    def __init__(self, cut: Cut, slopes: tuple[float, float]) -> None:
        # A zero bubble's first and last microbatch cost F + B - W, a third, instead of F + B + W.
        zero_bubble = cut.order == "zero bubble" and not cut.recompute
        self.fill = 0.0 if cut.stages == 1 else 1 / 3 if zero_bubble else 1 / cut.chunks
        self.often = cut.microbatches - self.fill
        self.slopes = slopes

    def slowest_stage(self, seconds: float, load: Load) -> float:
        """Return what a unit adds to the time of its stage."""
        return self.often * seconds + self.slopes[0] * load.own + self.slopes[1] * load.common


@functools.lru_cache(maxsize=256)
def _chooser(machine: Machine, gamma: float, ranks: int) -> Chooser:
    return Chooser(machine, gamma, ranks)


def _by_rank(values: Sequence[float], ends: Sequence[int], ranks: int) -> list[float]:
    """Return sums of values over the units of each rank; stages are dealt out in turns."""
    stages = [sum(values[first:end]) for first, end in zip([0, *ends], ends)]
    return [sum(stages[rank::ranks]) for rank in range(ranks)]


def balanced(
    times: Sequence[float], stages: int, speeds: Sequence[float] | None = None
) -> list[int]:
    """Return the ends of contiguous stages whose slowest one is as fast as possible.

    Args:
        times: times of the units, on a device of speed 1.
        stages: number of stages.
        speeds: speed of each stage; 1 by default.

    Example:
        >>> balanced([1, 1, 1, 3], stages=2)
        [3, 4]
        >>> balanced([1, 1, 1, 3], stages=2, speeds=[1, 3])
        [1, 4]
    """
    if stages == 1:
        return [len(times)]
    speeds = speeds or [1.0] * stages
    total = np.concatenate([[0.0], np.cumsum(times)])
    between = total[None, :] - total[:, None]
    between[np.tril_indices(len(total))] = np.inf
    best = between[0] / speeds[0]
    steps = []
    for speed in speeds[1:]:
        slowest_of = np.maximum(best[:, None], between / speed)
        steps.append(slowest_of.argmin(axis=0))
        best = slowest_of.min(axis=0)
    ends = [len(times)]
    for step in reversed(steps):
        ends.insert(0, int(step[ends[0]]))
    return ends
