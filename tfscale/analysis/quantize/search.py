"""Search among some hundreds of nets, which are described by one choice for each block.

The score of a net is taken for a sum of effects of its choices. A few nets are trained for a short
time, least squares give the effects (``effects.py``), and the integer program of ``program.py``
finds the nets with the largest sums within the limit of latency. These few are trained fully.

Time decides how many: the first finalist says how much longer a full training takes than a short
one, which together with the effects of choices on time gives the time of all nets. The search goes
on while it stays within a share of that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfscale.analysis.quantize.effects import Choices, Design
from tfscale.analysis.quantize.study import table
from tfscale.support import arguments

MOST = 512  # nets in a space
_PROBES = 3  # short trainings for each effect, at most
Score = Callable[[dict[str, Any], float], float]
Trained = tuple[dict[str, Any], float, float]  # the choices, the score, and the seconds
Train = Callable[[Sequence[dict[str, Any]], float], list[Trained]]
_SPACE = "the measured seconds of each choice, for each block: {'stem': {8: 1e-4, 16: 2e-4}}"


@dataclasses.dataclass(frozen=True)
class Net:
    """A net that was trained.

    Args:
        choices: the choice of each block.
        latency: sum of the choices' seconds.
        predicted: score that the sum of effects predicts.
        score: score after the training.
        effort: share of the full training that it had.
        seconds: time that the training took.
    """

    choices: Choices
    latency: float
    predicted: float
    score: float
    effort: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search.

    Args:
        nets: nets that were trained fully, the best one first.
        probes: nets that were trained for a short time.
        space: number of nets in the space.
        whole: estimated time of full trainings of all nets in the space, in seconds.
    """

    nets: tuple[Net, ...]
    probes: tuple[Net, ...]
    space: int
    whole: float

    @property
    def best(self) -> Net:
        """The net with the largest score within the limit."""
        return self.nets[0]

    @property
    def trainings(self) -> float:
        """Number of full trainings that the search took."""
        return sum(net.effort for net in (*self.nets, *self.probes))

    @property
    def seconds(self) -> float:
        """Time that all trainings took together."""
        return sum(net.seconds for net in (*self.nets, *self.probes))

    def __str__(self) -> str:
        blocks = list(self.best.choices)
        lines = [
            f"{len(self.nets)} of {self.space} nets trained fully, after {len(self.probes)} short "
            f"trainings: {self.seconds:.3g} s, and all nets would take about {self.whole:.3g} s"
        ]
        rows = [
            [*(str(net.choices[block]) for block in blocks), f"{net.latency:.3g}",
             f"{net.predicted:.4g}", f"{net.score:.4g}"]
            for net in self.nets
        ]  # fmt: skip
        return "\n".join([*lines, *table([*blocks, "seconds", "predicted", "score"], rows)])


def search(
    space: Mapping[str, Mapping[Any, float]],
    score: Score,
    *,
    latency: float,
    share: float = 0.1,
    effort: float = 0.25,
    finalists: int = 8,
    workers: int = 1,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Search:
    """Find the net with the best score within a latency, and train few nets of the space.

    Args:
        space: for each block, its choices and their measured seconds. Choices are widths, kernels,
            bits, or anything else that ``score`` understands. At most 512 nets.
        score: a function of the choices and of an effort between 0 and 1. It trains the net for
            that share of the full training, and returns a score of other data, such as an accuracy;
            more is better.
        latency: largest sum of seconds.
        share: largest time of all trainings, as a share of the time that full trainings of all nets
            in the space would take. It is estimated from the trainings.
        effort: share of the full training for nets from which effects are estimated.
        finalists: largest number of nets that are trained fully.
        workers: number of processes that train at a time. With more than one, ``score`` must be a
            function that another process can import.
        seed: seed of the choice of nets that are trained shortly.
        clock: a function without arguments that returns seconds. It is called before and after
            each training, in the same process.

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
    arguments.function(clock, "clock", "a function that returns seconds, such as time.process_time")
    nets = [dict(zip(blocks, each)) for each in itertools.product(*blocks.values())]
    design = Design(blocks, latency, nets)
    _check_share(share, len(nets), design.rank, effort)
    probes = design.telling(_PROBES * design.rank, np.random.default_rng(seed))
    with _trainer(score, clock, workers) as train:
        run = _Run(design, nets, train, share, effort)
        run.probe(probes[: design.rank])
        run.finish(run.best(1))
        run.probe(run.affordable(probes[design.rank :], effort, later=run.best(finalists - 1)))
        run.finish(run.affordable(run.best(finalists - 1), 1.0))
    return run.result()


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


def _check_share(share: float, nets: int, effects: int, effort: float) -> None:
    least = (1 + effects * effort) / nets
    if share < least:
        more = f"raise share to {math.ceil(1e3 * least) / 1e3:g}, or " if least <= 1 else ""
        raise ValueError(
            f"share={share:g} of {nets} nets is the time of {share * nets:.3g} full trainings, and "
            f"one of them and {effects} short ones, one for each effect, take at least that of "
            f"{1 + effects * effort:.3g}: {more}lower effort"
        )


class _Run:
    """Trainings of a search, and what they say of the scores and times of other nets.

    Args:
        design: effects of choices.
        nets: all nets of the space.
        train: a function that trains nets, and returns scores and seconds.
        share: largest share of the time of all nets.
        effort: share of the full training that short ones have.
    """

    def __init__(
        self,
        design: Design,
        nets: Sequence[dict[str, Any]],
        train: Train,
        share: float,
        effort: float,
    ) -> None:
        self._design, self._nets, self._train = design, nets, train
        self._share, self._effort = share, effort
        self._short: list[Trained] = []
        self._full: list[Trained] = []

    def probe(self, nets: Sequence[dict[str, Any]]) -> None:
        """Train nets for a short time."""
        self._short += self._train(nets, self._effort)

    def finish(self, nets: Sequence[dict[str, Any]]) -> None:
        """Train nets fully."""
        self._full += self._train(nets, 1.0)

    def best(self, count: int) -> list[dict[str, Any]]:
        """Return the nets with the largest predicted scores that were not trained fully yet."""
        known = [net for net, *_ in self._full]
        found = self._design.best(self._effects_on_scores(), count + len(known))
        return [net for net in found if net not in known][:count]

    def affordable(
        self,
        nets: Sequence[dict[str, Any]],
        effort: float,
        later: Sequence[dict[str, Any]] = (),
    ) -> list[dict[str, Any]]:
        """Return the first nets, as many as can be trained in the time that is left.

        Args:
            nets: nets to be trained.
            effort: share of the full training that they have.
            later: nets to be trained fully later, whose time is kept.
        """
        whole, longer = self._whole()
        spent = sum(seconds for *_, seconds in (*self._short, *self._full))
        left = self._share * whole - spent - longer * self._times(later).sum()
        needed = self._times(nets) * (longer if effort == 1 else 1.0)
        return list(nets[: int((np.cumsum(needed) <= left).sum())])

    def result(self) -> Search:
        """Return the nets that were trained; warn if the least that had to be trained was more than
        the share.
        """
        effects = self._effects_on_scores()

        def told(trained: Trained, part: float) -> Net:
            net, score, seconds = trained
            design = self._design
            return Net(
                net, design.seconds(net), design.predicted(effects, net), score, part, seconds
            )

        full = sorted((told(each, 1.0) for each in self._full), key=lambda net: -net.score)
        short = [told(each, self._effort) for each in self._short]
        found = Search(tuple(full), tuple(short), len(self._nets), self._whole()[0])
        least = len(full) == 1 and len(short) == self._design.rank
        if least and found.seconds > self._share * found.whole:
            warnings.warn(
                f"{len(short)} short trainings, one for each effect, and a full one took "
                f"{found.seconds / found.whole:.1%} of the time of all {found.space} nets, and "
                f"share={self._share:g}: lower effort, or leave out choices",
                RuntimeWarning,
                stacklevel=3,
            )
        return found

    def _effects_on_scores(self) -> np.ndarray:
        nets, scores, _ = zip(*self._short, strict=True)
        return self._design.effects(nets, scores)

    def _times(self, nets: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the predicted seconds of short trainings."""
        known, _, seconds = zip(*self._short, strict=True)
        effects = self._design.effects(known, seconds)
        least = min(seconds)  # a sum of effects can be negative
        return np.array([max(least, self._design.predicted(effects, net)) for net in nets])

    def _whole(self) -> tuple[float, float]:
        """Return the estimated time of full trainings of all nets, and how many times longer a
        full training takes than a short one.
        """
        full = sum(seconds for *_, seconds in self._full)
        longer = full / max(1e-9, self._times([net for net, *_ in self._full]).sum())
        return longer * float(self._times(self._nets).sum()), longer


@contextlib.contextmanager
def _trainer(score: Score, clock: Callable[[], float], workers: int) -> Iterator[Train]:
    """Yield a function that trains nets, one by one or in processes."""

    def train(nets: Sequence[dict[str, Any]], effort: float) -> list[Trained]:
        timed = functools.partial(_timed, score, clock, effort)
        return [
            (net, arguments.real(one, f"the score of {net}", what="a finite number"), seconds)
            for net, (one, seconds) in zip(nets, run(timed, nets), strict=True)
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


def _timed(
    score: Score, clock: Callable[[], float], effort: float, net: dict[str, Any]
) -> tuple[float, float]:
    begin = clock()
    found = score(net, effort)
    return found, clock() - begin
