r"""Search among some hundreds of nets, which are described by one choice for each block.

The score of a net is taken for a sum over blocks, :math:`s \approx s_0 + \sum_b e_{b c_b}`. A few
nets are trained for a short time, least squares give the effects :math:`e`, and the integer program
of ``program.py`` finds the nets with the largest sums within the limit of latency. These few are
trained fully.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfscale.analysis.quantize.program import Program, Resource
from tfscale.analysis.quantize.study import table
from tfscale.support import arguments

MOST = 512  # nets in a space
_RIDGE = 1e-2  # keeps effects small that the trained nets do not tell apart
_SPACE = "the measured seconds of each choice, for each block: {'stem': {8: 1e-4, 16: 2e-4}}"

Choices = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Net:
    """A net that was trained.

    Args:
        choices: the choice of each block.
        latency: sum of the choices' seconds.
        predicted: score that the sum of effects predicts.
        score: score after the training.
        effort: share of the full training that it had.
    """

    choices: Choices
    latency: float
    predicted: float
    score: float
    effort: float


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search.

    Args:
        nets: nets that were trained fully, the best one first.
        probes: nets that were trained for a short time.
        space: number of nets in the space.
    """

    nets: tuple[Net, ...]
    probes: tuple[Net, ...]
    space: int

    @property
    def best(self) -> Net:
        """The net with the largest score within the limit."""
        return self.nets[0]

    @property
    def trainings(self) -> float:
        """Number of full trainings that the search took."""
        return sum(net.effort for net in (*self.nets, *self.probes))

    def __str__(self) -> str:
        blocks = list(self.best.choices)
        lines = [
            f"{len(self.nets)} of {self.space} nets trained fully, after {len(self.probes)} short "
            f"trainings: {self.trainings:.3g} full trainings in all, "
            f"{self.trainings / self.space:.1%} of the space"
        ]
        rows = [
            [*(str(net.choices[block]) for block in blocks), f"{net.latency:.3g}",
             f"{net.predicted:.4g}", f"{net.score:.4g}"]
            for net in self.nets
        ]  # fmt: skip
        return "\n".join([*lines, *table([*blocks, "seconds", "predicted", "score"], rows)])


def search(
    space: Mapping[str, Mapping[Any, float]],
    score: Callable[[dict[str, Any], float], float],
    *,
    latency: float,
    share: float = 0.1,
    effort: float = 0.25,
    finalists: int = 4,
    workers: int = 1,
    seed: int = 0,
) -> Search:
    """Find the net with the best score within a latency, and train few nets of the space.

    Args:
        space: for each block, its choices and their measured seconds. Choices are widths, kernels,
            bits, or anything else that ``score`` understands. At most 512 nets.
        score: a function of the choices and of an effort between 0 and 1. It trains the net for
            that share of the full training, and returns a score of other data, such as an accuracy;
            more is better.
        latency: largest sum of seconds.
        share: largest number of full trainings, as a share of the nets in the space.
        effort: share of the full training for nets from which effects are estimated.
        finalists: number of nets that are trained fully.
        workers: number of processes that train at a time. With more than one, ``score`` must be a
            function that another process can import.
        seed: seed of the choice of nets that are trained shortly.

    Example:
        >>> space = {"width": {8: 1.0, 16: 2.0}, "kernel": {3: 1.0, 5: 2.0}, "bits": {4: 1, 8: 2}}
        >>> def score(net, effort):
        ...     return net["width"] + net["kernel"] + net["bits"] / 4
        >>> found = tfscale.quantize.search(space, score, latency=5, share=1)
        >>> found.best.choices, found.best.score
        ({'width': 16, 'kernel': 5, 'bits': 4}, 22.0)
    """
    blocks = _checked_space(space)
    arguments.function(score, "score", "a function of the choices and of an effort")
    latency = arguments.seconds(latency, "latency")
    share = arguments.real(share, "share", 0, 1)
    effort = arguments.real(effort, "effort", most=1, above=0)
    finalists = arguments.whole(finalists, "finalists", 1, what="a number of nets")
    workers = arguments.whole(workers, "workers", 1, what="a number of processes")
    seed = arguments.whole(seed, "seed", 0)
    nets = [dict(zip(blocks, each)) for each in itertools.product(*blocks.values())]
    count = _number_of_probes(blocks, len(nets), share, effort, finalists)
    design = _Design(blocks, latency)
    first = design.fastest()
    probes = design.spread(nets, count, np.random.default_rng(seed))
    with _trainer(score, workers) as train:
        seen = train([(net, effort) for net in probes])
        effects = design.effects(probes, seen)
        chosen = design.best(effects, finalists) or [first]
        scores = train([(net, 1.0) for net in chosen])

    def told(net: dict[str, Any], found: float, part: float) -> Net:
        return Net(net, design.seconds(net), design.predicted(effects, net), found, part)

    full = [told(net, found, 1.0) for net, found in zip(chosen, scores, strict=True)]
    full.sort(key=lambda net: -net.score)
    short = [told(net, found, effort) for net, found in zip(probes, seen, strict=True)]
    return Search(tuple(full), tuple(short), len(nets))


def _checked_space(space: Any) -> dict[str, dict[Any, float]]:
    found = {
        arguments.text(block, "a block of space"): {
            choice: arguments.seconds(seconds, f"space[{block!r}][{choice!r}]", least=0)
            for choice, seconds in arguments.mapping(
                choices, f"space[{block!r}]", _SPACE
            ).items()
        }
        for block, choices in arguments.mapping(space, "space", _SPACE).items()
    }  # fmt: skip
    if not found or not all(found.values()):
        raise arguments.wrong(space, "space", _SPACE)
    count = math.prod(map(len, found.values()))
    if count > MOST:
        raise ValueError(
            f"space has {count:,} nets, and quantize.search takes at most {MOST}: a sum of effects "
            "is no model of larger spaces. Leave out choices, or search by KerasTuner or AutoKeras"
        )
    return found


def _number_of_probes(
    blocks: Mapping[str, Any], nets: int, share: float, effort: float, finalists: int
) -> int:
    effects = 1 + sum(len(choices) - 1 for choices in blocks.values())
    left = share * nets - finalists
    count = min(int(left / effort + 1e-9), 3 * effects, nets)
    if count < effects:
        least = (finalists + effects * effort) / nets
        more = f"raise share to {math.ceil(1e3 * least) / 1e3:g}, or " if least <= 1 else ""
        raise ValueError(
            f"share={share:g} of {nets} nets is {share * nets:.3g} full trainings, and {finalists} "
            f"finalists and {effects} short trainings, one for each effect, take "
            f"{finalists + effects * effort:.3g}: {more}lower finalists or effort"
        )
    return count


class _Design:
    """Choices as numbers, and what they say of scores."""

    def __init__(self, blocks: Mapping[str, Mapping[Any, float]], latency: float) -> None:
        self._blocks = {block: list(choices) for block, choices in blocks.items()}
        # The program chooses widths, which are numbers: a choice's number is its place.
        self._uses = [dict(enumerate(choices.values())) for choices in blocks.values()]
        self._limit = Resource("latency", self._uses, latency, "{:.4g} s".format)

    def fastest(self) -> dict[str, Any]:
        """Return the fastest net; raise if it exceeds the limit."""
        return self._net(Program(self._uses, [self._limit]).solve().bits)

    def seconds(self, net: Choices) -> float:
        """Return the sum of a net's seconds."""
        return self._limit.used(self._places(net))

    def spread(
        self, nets: Sequence[dict[str, Any]], count: int, rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        """Return nets in which each choice occurs about equally often, of those within the limit
        and near to it first.
        """
        used = [np.zeros(len(choices)) for choices in self._blocks.values()]
        noise = rng.random(len(nets))
        far = np.array([max(0.0, self.seconds(net) / self._limit.limit - 1) for net in nets])
        chosen: list[int] = []
        for _ in range(count):
            often = [
                sum(counts[place] for counts, place in zip(used, self._places(net), strict=True))
                for net in nets
            ]
            order = np.array(often) + far + 0.5 * noise
            order[chosen] = np.inf
            chosen.append(int(order.argmin()))
            for counts, place in zip(used, self._places(nets[chosen[-1]]), strict=True):
                counts[place] += 1
        return [nets[i] for i in chosen]

    def effects(self, nets: Sequence[Choices], scores: Sequence[float]) -> np.ndarray:
        """Return the mean score, and the effect of each choice of each block."""
        rows = np.array([self._row(net) for net in nets])
        penalty = _RIDGE * np.eye(rows.shape[1])
        penalty[0, 0] = 0
        return np.linalg.solve(rows.T @ rows + penalty, rows.T @ np.asarray(scores, float))

    def predicted(self, effects: np.ndarray, net: Choices) -> float:
        """Return the score that a sum of effects predicts."""
        return float(self._row(net) @ effects)

    def best(self, effects: np.ndarray, count: int) -> list[dict[str, Any]]:
        """Return the nets within the limit with the largest sums of effects."""
        costs, begin = [], 1
        for choices in self._blocks.values():
            mine = effects[begin : begin + len(choices)]
            costs.append(dict(enumerate((mine.max() - mine).tolist())))
            begin += len(choices)
        found = Program(costs, [self._limit]).solutions(count)
        return [self._net(one.bits) for one in found]

    def _row(self, net: Choices) -> np.ndarray:
        parts = [
            np.eye(len(choices))[place]
            for choices, place in zip(self._blocks.values(), self._places(net), strict=True)
        ]
        return np.concatenate([[1.0], *parts])

    def _places(self, net: Choices) -> list[int]:
        return [choices.index(net[block]) for block, choices in self._blocks.items()]

    def _net(self, places: Sequence[int]) -> dict[str, Any]:
        pairs = zip(self._blocks.items(), places, strict=True)
        return {block: choices[place] for (block, choices), place in pairs}


@contextlib.contextmanager
def _trainer(
    score: Callable[[dict[str, Any], float], float], workers: int
) -> Iterator[Callable[[Sequence[tuple[dict[str, Any], float]]], list[float]]]:
    """Yield a function that returns the scores of nets, trained one by one or in processes."""

    def train(nets: Sequence[tuple[dict[str, Any], float]]) -> list[float]:
        found = run(score, *zip(*nets, strict=True))
        return [
            arguments.real(one, f"the score of {net}", what="a finite number")
            for (net, _), one in zip(nets, found, strict=True)
        ]

    if workers == 1:
        run: Any = map
        yield train
        return
    # A forked process would share TensorFlow's threads, and hang.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        run = pool.map
        yield train
