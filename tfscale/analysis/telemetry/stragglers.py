"""Comparison of the workers' lines of telemetry, step by step: who waits for whom."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale.support import arguments, figures
from tfscale.support.figures import INK, bare
from tfscale.support.text import wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUND = 8  # steps
_CLEAR = 0.05  # share of the time below which a wait is noise
_FAINT, _COLOURS = "#d7dbe0", ("#c4492f", "#2f6fc4", "#3d8f4f", "#9a5fb5")


@dataclasses.dataclass(frozen=True)
class Stragglers:
    """Seconds that each worker has computed and waited in each step.

    Arrays have a row for each worker and a column for each step that all workers have measured.

    Attributes:
        workers: names of the workers.
        steps: numbers of the steps.
        begins: moments at which the steps began, in seconds of ``time.time()``.
        computed: seconds in which each worker did not wait.
        waited: seconds in which each worker waited for others.
    """

    workers: Sequence[str]
    steps: np.ndarray
    begins: np.ndarray
    computed: np.ndarray
    waited: np.ndarray

    @property
    def slowest(self) -> int | None:
        """Index of the worker that others wait for; None if nobody waits for long."""
        total = self.computed.sum(1)
        worker = int(total.argmax())
        others = np.delete(total, worker)
        is_clear = total[worker] - others.mean() > _CLEAR * total[worker]
        return worker if is_clear else None

    @property
    def since(self) -> int:
        """Index of the step from which on the others wait for the slowest worker.

        It is the step that best divides the training in a part before, in which the worker is as
        fast as the others, and a part afterwards.
        """
        if self.slowest is None:
            return 0
        others = np.delete(self.computed, self.slowest, 0).mean(0)
        late = self.computed[self.slowest] - others
        gained = np.cumsum((late - late.max() / 2)[::-1])[::-1]
        return int(gained.argmax())

    @property
    def seconds(self) -> float:
        """Seconds that all these steps take if each waits for the slowest worker."""
        return late_by(self.computed, 0)

    def with_bound(self, bound: int) -> float:
        """Return how long the steps would take with ``sync.BoundedStaleness(bound)``."""
        return late_by(self.computed, bound)

    def with_shares(self) -> float:
        """Return how long the steps would take if all workers had work for equally long."""
        mean = self.computed.mean(1)
        return float(len(self.steps) * len(mean) / np.sum(1 / np.maximum(mean, 1e-9)))

    def figures(self) -> dict[str, Any]:
        """Return who waits for whom, since when, and what would help, by name.

        Without a worker that others wait for, the name is None, and nothing else is there.
        """
        if self.slowest is None:
            return {"worker": None}
        first = self.since
        later = np.delete(self.waited, self.slowest, 0)[:, first:]
        return {
            "worker": self.workers[self.slowest],
            "wait": float(later.mean()),
            "since": int(self.steps[first]),
            "time": float(self.begins[first]),
            "waited": float(later.mean(0).sum()),
            "shares_save": 1 - self.with_shares() / self.seconds,
            "bound_saves": 1 - self.with_bound(BOUND) / self.seconds,
        }

    def __str__(self) -> str:
        """Return in words who waits for whom, since when, and what would help."""
        if self.slowest is None:
            return "No worker waits for another one for long."
        found = self.figures()
        began = time.strftime("%H:%M:%S", time.localtime(found["time"]))
        lines = [
            f"The others wait for {found['worker']}: {1e3 * found['wait']:,.0f} ms of a step, "
            f"since step {found['since']:,} ({began}), {found['waited']:,.1f} s in all."
        ]
        for what, saves in (
            ("Shares of the batch that fit each worker's speed", found["shares_save"]),
            (f"sync=BoundedStaleness(bound={BOUND})", found["bound_saves"]),
        ):
            lines.append(
                f"{what} would save {saves:.0%} of the time."
                if saves > _CLEAR
                else f"{what} would not help: it would save {max(saves, 0.0):.0%} of the time."
            )
        return wrapped(" ".join(lines))

    def draw(self, most: int = 60) -> Figure:
        """Plot when each worker computed, and for whom it waited. Needs matplotlib.

        Args:
            most: number of steps, from the one on since which the others wait.
        """
        first = max(0, min(self.since - most // 4, len(self.steps) - most))
        steps = slice(first, first + most)
        late = self.computed[:, steps]
        figure = figures.figure(7.0, 0.9 + 0.4 * len(self.workers))
        panel = figure.subplots()
        begins, ends = spans(late, 0)
        for worker in range(len(self.workers)):
            widths = np.maximum(late[worker], 1e-6)
            panel.broken_barh(
                list(zip(begins[worker], widths, strict=True)), (worker - 0.35, 0.7), color=_FAINT
            )
            for whom in range(len(self.workers)):
                waits = (ends.argmax(0) == whom) & (ends[worker] < ends.max(0))
                bars = [
                    (end, last - end)
                    for end, last in zip(ends[worker][waits], ends.max(0)[waits], strict=True)
                ]
                colour = _COLOURS[whom % len(_COLOURS)]
                panel.broken_barh(bars, (worker - 0.35, 0.7), color=colour)
        for whom in sorted(set(ends.argmax(0).tolist())):
            colour = _COLOURS[whom % len(_COLOURS)]
            panel.plot([], [], color=colour, linewidth=6, label=f"waits for {self.workers[whom]}")
        panel.plot([], [], color=_FAINT, linewidth=6, label="computes")
        panel.set_yticks(range(len(self.workers)), self.workers)
        panel.invert_yaxis()
        panel.set_xlabel(f"seconds from step {self.steps[first]:,} on", fontsize=8, color=INK)
        bare(panel)
        panel.legend(
            frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1)
        )
        return figure


def spans(computed: np.ndarray, bound: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Return when each worker's steps begin and end, if none is ahead by more than a bound.

    Worker w begins step t when it has ended step t - 1, and all workers have ended step t - 1 -
    bound. Exchanges take no time.

    Args:
        computed: seconds of each worker's steps, a row for each worker.
        bound: the number of steps.
    """
    begins, ends = np.zeros_like(computed), np.zeros_like(computed)
    for step in range(computed.shape[1]):
        if step:
            begins[:, step] = ends[:, step - 1]
        if step > bound:
            begins[:, step] = np.maximum(begins[:, step], ends[:, step - 1 - bound].max())
        ends[:, step] = begins[:, step] + computed[:, step]
    return begins, ends


def late_by(computed: np.ndarray, bound: int) -> float:
    """Return how long steps take if no worker is ahead of another one by more than a bound.

    Example:
        >>> import numpy as np
        >>> turns = np.array([[4.0, 1.0, 1.0, 1.0], [1.0, 1.0, 4.0, 1.0]])  # each is slow once
        >>> late_by(turns, bound=0), late_by(turns, bound=8)
        (10.0, 7.0)
        >>> slow = np.array([[4.0, 4.0, 4.0], [1.0, 1.0, 1.0]])  # no bound helps
        >>> late_by(slow, bound=0), late_by(slow, bound=8)
        (12.0, 12.0)
    """
    return float(spans(computed, bound)[1].max(initial=0.0))


def stragglers(files: Sequence[str | Path]) -> Stragglers:
    r"""Return who waits for whom, from the JSON lines of all workers of a training.

    Args:
        files: the files that ``Telemetry(jsonl=...)`` wrote, one for each worker.

    Example:
        >>> import json, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> def line(step, own):  # as ``Telemetry`` writes a step of 0.4 s
        ...     step = {"kind": "step", "step": step, "steps": 1, "begin": 0.4 * step}
        ...     return json.dumps(step | {"seconds": 0.4, "waited": 0.4 - own, "usual": True})
        >>> for rank, own in enumerate([0.1, 0.4]):
        ...     lines = "\n".join(line(step, own) for step in range(50))
        ...     _ = (folder / f"run.rank{rank}.jsonl").write_text(lines)
        >>> found = tfscale.telemetry.stragglers(sorted(folder.glob("run.rank*.jsonl")))
        >>> found.workers[found.slowest]
        'rank 1'

    Raises:
        ValueError: the files have no step in common.
    """
    files = arguments.items(files, "files", "a list of at least two paths", arguments.path, least=2)
    workers, rows = [], []
    for number, file in enumerate(files):
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        ranks = next((line["ranks"] for line in lines if line["kind"] == "start"), [number])
        workers.append(name_of(ranks))
        rows.append(dict(steps_of(lines)))
    found = compared(workers, rows)
    if found is None:
        raise ValueError(
            f"the files {[str(file) for file in files]} have no step in common whose waits were "
            "measured. Pass the files of all workers of one training, which "
            'Telemetry(jsonl="run.jsonl") wrote; its first step is left out'
        )
    return found


def name_of(ranks: Sequence[int]) -> str:
    """Return the name of the worker that has these ranks."""
    return f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


# For each step: seconds, waited seconds, and the moment at which the step began.
Steps = Mapping[int, Sequence[float]]


def compared(workers: Sequence[str], rows: Sequence[Steps]) -> Stragglers | None:
    """Return who waits for whom, from the steps of each worker; None if none is common to all."""
    common = sorted(set.intersection(*(set(row) for row in rows)))
    if not common:
        return None
    seconds, waited, begins = (
        np.array([[row[step][place] for step in common] for row in rows]) for place in range(3)
    )
    waited = np.minimum(waited, seconds)
    exchange = waited.min(0)  # this much takes the exchange itself, without anybody to wait for
    return Stragglers(workers, np.array(common), begins.min(0), seconds - waited, waited - exchange)


def steps_of(
    lines: Iterable[Mapping[str, Any]],
) -> Sequence[tuple[int, tuple[float, float, float]]]:
    """Return seconds, waits and the beginning of each step; a line may be of several steps."""
    found = []
    for line in lines:
        if line.get("kind", "step") != "step" or not line["usual"] or line.get("waited") is None:
            continue
        count = line["steps"]
        for place in range(count):
            begin = line["begin"] + place * line["seconds"] / count
            found.append(
                (line["step"] + place, (line["seconds"] / count, line["waited"] / count, begin))
            )
    return found
