"""A callback that measures times and bytes of steps during training."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from tfscale.analysis.telemetry import report
from tfscale.analysis.telemetry.engine_log import EngineLog, engine_log_of
from tfscale.analysis.telemetry.errors import Distortion, Samples
from tfscale.analysis.telemetry.fit import Batches, Size, batches_of_fit
from tfscale.analysis.telemetry.meetings import Meetings
from tfscale.analysis.telemetry.sinks import JsonLines, TensorBoard
from tfscale.analysis.telemetry.steps import EFFICIENCIES, Mean, Window, split
from tfscale.analysis.telemetry.timeline import Recording
from tfscale.bridge.fit import forget_train_function
from tfscale.bridge.output import keep_out_of_bar
from tfscale.callbacks import progress
from tfscale.exchange.explain import Row
from tfscale.exchange.scaling import scaling
from tfscale.native.bucket import BucketId
from tfscale.parallel.planned import kept_by
from tfscale.support import arguments
from tfscale.support.names import TIMELINE_VARIABLE
from tfscale.support.resident import highest_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOT_IN_BAR = {"communication_ms", "exposed_ms", "sent_mb", "saved_mb", *EFFICIENCIES}

VERSION = 3  # version of the JSON lines

_TOO_SHORT = (
    "no timeline was written: it should begin after %d steps of fit, but fit made only %d. "
    "Choose its steps with Telemetry(profile=(first, end))"
)

SHARE = 0.005  # largest share of the training time that telemetry may use
SHORTEST = 0.01  # seconds: reporting each step separately costs some hundredths of a millisecond


def _step(value: int, name: str) -> int:
    return arguments.whole(value, name, 0, what="a number of steps")


class Telemetry(keras.callbacks.Callback):
    r"""A callback that measures each step: its time, its bytes, and how long sending takes.

    The callback writes these numbers into ``History``, into TensorBoard, into a file of JSON lines
    and into a timeline. The progress bar shows only ``samples_per_second``, since it has no room
    for more. ``docs/telemetry.md`` explains each number and its limits.

    The engine always keeps a log of what it sends. This callback reads the log at the end of each
    epoch, and between steps if all its reading so far took less than half a percent of the time.
    Steps of less than 10 ms share a line. For each bucket on a lossy wire, the traced step gets a
    few small operations, which copy a sample of the bucket's gradients. The next ``fit`` traces the
    step again without them.

    Exposed time begins when a rank hands over the last of its gradients, at the end of its backward
    pass, and ends when the rank has all sums. With ``baseline``, the scaling efficiency is
    measured: ``efficiency_measured`` is

    .. math:: \frac{\text{samples per second}}{\text{devices} \cdot \text{baseline}}

    Without ``baseline``, ``efficiency_estimated`` is 1 - exposed / step, an upper estimate.

    If there are several workers, each writes its own files, with its first rank in their names,
    and shows the times and bytes of its own ranks.

    Args:
        jsonl: a file for JSON lines: one for each step, and a few more.
        tensorboard: a folder for TensorBoard.
        timeline: a file for Perfetto (https://ui.perfetto.dev), of the steps in ``profile``;
            ``tfscale launch --timeline`` requests such a file, too.
        progress: whether the numbers go to ``logs``: to the progress bar, to ``History`` and to
            the callbacks that come later in the list.
        batch: number of samples of the global batch, if ``fit`` cannot know (a generator); or a
            function from a step's number to that number, such as ``BatchGrowth.size``.
        baseline: samples per second of one device.
        profile: the first step of the timeline and the one after its last, counted from the
            beginning of ``fit``. TensorFlow's profiler makes these steps slower; means leave them
            out.
        errors: whether to measure the errors of lossy wires.

    Example:
        >>> telemetry = tfscale.callbacks.Telemetry(jsonl="run.jsonl")
        >>> history = model.fit(x, y, batch_size=64, verbose=0, callbacks=[telemetry])
        >>> summary = telemetry.summary()  # a text, to be printed
    """

    async_safe = True  # otherwise Keras waits for each step's result before it starts the next

    def __init__(
        self,
        jsonl: str | Path | None = None,
        tensorboard: str | Path | None = None,
        timeline: str | Path | None = None,
        *,
        progress: bool = True,
        batch: Size | None = None,
        baseline: float | None = None,
        profile: tuple[int, int] = (10, 13),
        errors: bool = True,
    ) -> None:
        super().__init__()
        expected = (
            "the first step of the timeline and the one after its last, counted from 0, "
            "such as (10, 13)"
        )
        first, end = arguments.items(profile, "profile", expected, _step, least=2, most=2)
        if first >= end:
            raise arguments.wrong(profile, "profile", expected)
        if not callable(batch):
            what = "a number of samples or a function from a step to a number"
            arguments.optional(arguments.whole, batch, "batch", 1, what=what)
        what = "a number of samples per second"
        arguments.optional(arguments.real, baseline, "baseline", above=0, what=what)
        for name, file in (("jsonl", jsonl), ("tensorboard", tensorboard), ("timeline", timeline)):
            arguments.optional(arguments.path, file, name)
        arguments.flag(progress, "progress")
        arguments.flag(errors, "errors")
        timeline = timeline or os.environ.get(TIMELINE_VARIABLE)
        self._paths = {"jsonl": jsonl, "tensorboard": tensorboard, "timeline": timeline}
        self._progress = progress
        self._given = batch
        self._baseline = baseline
        self._profiled = (first, end)
        self._wants_errors = errors
        self._begun = False
        self._engine_log: EngineLog | None = None
        self._forget()

    def _forget(self) -> None:
        """Reset the state of one ``fit``."""
        self._batches = Batches(None, None, None)
        self._devices = 1
        self._epoch = 0
        self._has_started = False
        self._first_step = 0
        self._step = 0
        # Finished batches of the epoch, with the time of their end; threads may add them in any
        # order.
        self._ends: list[tuple[int, float]] = []
        self._open: Window | None = None
        self._closed: list[Window] = []
        self._whole, self._usual = Mean(), Mean()
        self._epoch_whole, self._epoch_usual = Mean(), Mean()
        self._logged: dict[str, float] = {}
        self._points: list[tuple[dict[str, float], bool]] = []  # and whether means count them
        self._lines: JsonLines | None = None
        self._board: TensorBoard | None = None
        self._recording: Recording | None = None
        self._samples: Samples | None = None
        self._distortions: dict[BucketId, Distortion] = {}
        self._sent_before = 0
        self._behind: dict[int, float] = {}  # by the first step of an interval
        self._waited_before = 0.0
        self._meetings: Meetings | None = None
        self._meets_in_epochs = True
        self._begun_steps = 0  # of this fit, alike on all workers
        self._slowest: str | None = None
        self._shares: list[float] | None = None
        self._began = time.perf_counter()
        self._spent = 0.0

    # ------------------------------------------------------------------ Keras

    def set_model(self, model: Any) -> None:
        """Drop a training function that may lack samples; Keras then makes a new one."""
        super().set_model(model)
        if self._watches(model):
            forget_train_function(model)  # it may have been traced without samples

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the files, and attach to the strategy's engine."""
        self._forget()
        strategy = self.model.distribute_strategy
        self._engine_log = engine_log_of(strategy)
        self._devices = int(strategy.num_replicas_in_sync)
        self._batches = batches_of_fit(self.params or {}, self._given)
        if self._engine_log is not None:
            self._sent_before = self._engine_log.sent()
            ours = scaling(strategy)
            self._waited_before = 0.0 if ours is None else ours.seconds_behind()
            if ours is not None and ours.meets and self._engine_log.is_measured:
                self._meetings = Meetings(
                    ours.gathered_from_workers, self._engine_log.ranks_of_workers
                )
                # Otherwise workers do not make the same steps at the same time.
                self._meets_in_epochs = not ours.figures_of_rounds()
            if self._watches(self.model):
                self._samples = Samples(self._engine_log.communicators[0].device)
                self._engine_log.watch(self._samples.watch)
        keep_out_of_bar(_NOT_IN_BAR)
        self._open_sinks()
        self._began = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the means of the epoch."""
        self._start()
        self._epoch, self._ends = epoch, []
        self._epoch_whole, self._epoch_usual = Mean(), Mean()

    def _start(self) -> None:
        """Note the first step, once all callbacks have restored what they restore."""
        if self._has_started:
            return
        self._has_started = True
        self._step = self._first_step = progress.steps(self.model)
        self._write("start", **self._about())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin a measured interval; called once for each execution, in the thread that trains."""
        self._start()  # in a loop of the user without epochs
        now = time.time()
        steps = self._batches.steps(batch, int(self.model.steps_per_execution))
        self._begun_steps += steps
        if self._meets_in_epochs and self._meetings and self._meetings.are_due(self._begun_steps):
            self._close(now)
            self._read()
            self._meet(self._meetings)
        if self._open is not None and self._may_join(self._open, now):
            self._open.steps += steps
            return
        self._close(now)
        made = self._step - self._first_step
        if self._recording is not None:
            self._record(made, now)
        if self._closed and self._spent <= SHARE * (time.perf_counter() - self._began):
            self._read()
        usual = made > 0 and not (self._recording and self._recording.runs)
        self._open = Window(self._epoch, batch, self._step, steps, now, usual=usual)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the end of a batch; Keras may call this in another thread."""
        self._ends.append((batch, time.time()))
        if self._progress and logs is not None:
            logs.update(self._logged)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Read the log, and write the epoch's numbers."""
        last, now = max(self._ends, default=(-1, 0.0))
        if self._open is not None:  # the data may have ended before the interval's last step
            self._open.steps = min(self._open.steps, last + 1 - self._open.batch)
        self._close(now)
        self._read()
        if self._meetings is not None:
            self._meet(self._meetings)
        numbers = self._numbers(self._epoch_whole, self._epoch_usual)
        figures = self._round_figures()
        self._write("epoch", epoch=epoch, step=self._step, **numbers, **figures)
        if self._progress and logs is not None:
            logs.update(_without_step_ms(numbers))

    def _meet(self, meetings: Meetings) -> None:
        """Compare this worker's steps with those of all others, and say who waits for whom."""
        found = meetings.meet()
        if found is None:
            return
        figures = found.figures()
        self._write("straggler", step=self._step, **figures)
        if figures["worker"] != self._slowest and self._ranks()[0] == 0:
            logging.getLogger("tfscale").info("telemetry: %s", " ".join(str(found).split()))
        self._slowest = figures["worker"]

    def _round_figures(self) -> dict[str, Any]:
        """Return the figures of rounds, if replicas synchronize only in rounds."""
        ours = scaling(self.model.distribute_strategy)
        return {} if ours is None else ours.figures_of_rounds()

    def on_train_end(self, logs: Any = None) -> None:
        """Write the totals, and close the files."""
        if self._recording is not None:
            self._finish_recording(time.time())
        totals: dict[str, Any] = {"steps": self._whole.steps, "seconds": self._whole.seconds}
        totals |= {what: round(value) for what, value in self._whole.counted.items()
                   if what in ("samples", "sent", "saved")}  # fmt: skip
        if self._engine_log is not None and self._engine_log.is_measured:
            totals["sent_in_all"] = self._engine_log.sent() - self._sent_before
        self._write("end", **totals, **self._memory(), **self._numbers(self._whole, self._usual))
        for sink in (self._lines, self._board):
            if sink is not None:
                sink.close()
        self._lines = self._board = None
        if self._samples is not None and self._engine_log is not None:
            self._engine_log.watch(None)
            forget_train_function(self.model)  # the next function has no samples

    # # ----------------------------------------------------------------- people

    def summary(self) -> str:
        """Return a table of the last ``fit``."""
        self._check_has_seen_a_fit()
        rows = self._engine_log.rows if self._engine_log is not None else []
        by = "estimated" if self._baseline is None else f"against {self._baseline:g} samples/s"
        numbers = self._numbers(self._whole, self._usual)
        return report.summary(self._whole, numbers, by, rows, self._distortions, self._words())

    def draw(self) -> Figure:
        """Plot rates, times and bytes of the last ``fit``. Needs matplotlib."""
        self._check_has_seen_a_fit()
        usual = [point for point, usual in self._points if usual]
        others = [point for point, usual in self._points if not usual]
        return report.draw(usual or others, others if usual else [])

    def _check_has_seen_a_fit(self) -> None:
        if not self._begun:
            raise ValueError(
                "there is nothing to show yet: Telemetry measures a training, "
                "model.fit(..., callbacks=[telemetry])"
            )

    # ---------------------------------------------------------------- reading

    def _may_join(self, window: Window, now: float) -> bool:
        return window.usual and self._recording is None and now - window.begin < SHORTEST

    def _close(self, now: float) -> None:
        window, self._open = self._open, None
        if window is not None and window.steps > 0:
            window.end = now
            window.samples = self._batches.samples(window.batch, window.step, window.steps)
            self._note_behind(window)
            self._step += window.steps
            self._closed.append(window)

    def _note_behind(self, window: Window) -> None:
        """Note how long the steps of an interval have waited for sums in the background."""
        ours = scaling(self.model.distribute_strategy)
        if ours is not None and self._engine_log is not None:
            waited = ours.seconds_behind()
            self._behind[window.step] = waited - self._waited_before
            self._waited_before = waited

    def _read(self) -> None:
        """Read the engine's log about finished intervals, and report."""
        begin = time.perf_counter()
        windows, self._closed = self._closed, []
        if self._engine_log is not None:
            self._read_engine_log(self._engine_log, windows)
        whole, usual = Mean(), Mean()
        for window in windows:
            whole.add(window)
            if window.usual:
                usual.add(window)
            if self._lines is not None:
                self._lines.write("step", {**vars(window), "seconds": window.seconds})
        for mean, more in (
            (self._epoch_whole, whole), (self._whole, whole),
            (self._epoch_usual, usual), (self._usual, usual),
        ):  # fmt: skip
            mean.merge(more)
        if windows:
            self._tell(self._numbers(whole, usual), usual.steps > 0)
        if self._lines is not None:
            self._lines.flush()
        self._spent += time.perf_counter() - begin

    def _read_engine_log(self, log: EngineLog, windows: list[Window]) -> None:
        executions, since = log.read()
        if self._recording is not None:
            self._recording.heard(executions)
        for old, row in log.changes():
            before = {} if old is None else {"before": old.algorithm}
            kind = "choice" if old is None else "switch"
            self._write(kind, step=self._step, **before, **_fields(row))
        for change in log.new_methods():
            self._write("method", **dataclasses.asdict(change))
            if self._recording is not None:
                self._recording.changed(change)
        parts = [split(mine, windows) for mine in executions]
        for window, ranks in zip(windows, zip(*parts, strict=True), strict=True):
            if window.begin >= since and log.is_measured:
                behind = self._behind.pop(window.step, 0.0)
                window.account(ranks, log.saved, log.is_behind_steps, behind)
        if self._meetings is not None:
            self._meetings.add(windows)
        ours = scaling(self.model.distribute_strategy)
        if ours is not None and (shares := ours.shares_of_batch()) != self._shares:
            self._shares = shares
            self._write("shares", step=self._step, shares=shares)
        if self._samples is not None and windows:
            for distortion in self._samples.distortions():
                self._distortions[distortion.bucket] = distortion
                self._write("error", step=self._step, **_fields(distortion))

    def _tell(self, numbers: dict[str, float], usual: bool) -> None:
        self._points.append(({"step": self._step, **numbers}, usual))
        self._logged = _without_step_ms(numbers)
        if self._board is not None:
            errors = {
                f"error/{name}": distortion.error for name, distortion in self._distortions.items()
            }
            self._board.write(self._step, {**numbers, **errors})

    # --------------------------------------------------------------- timeline

    def _record(self, made: int, now: float) -> None:
        assert self._recording is not None
        first, last = self._profiled
        if self._recording.runs and made >= last:
            self._finish_recording(now)
        elif first <= made < last:
            if not self._recording.runs:
                self._read()  # the timeline begins here
            self._recording.step(now)

    def _finish_recording(self, now: float) -> None:
        assert self._recording is not None
        self._read()
        if self._recording.runs:
            self._recording.finish(now)
        else:
            logging.getLogger("tfscale").warning(_TOO_SHORT, self._profiled[0], self._whole.steps)
        self._recording = None

    # ------------------------------------------------------------------ sinks

    def _open_sinks(self) -> None:
        jsonl, board, timeline = (self._own_path(name) for name in self._paths)
        if jsonl is not None:
            self._lines = JsonLines(jsonl, more=self._begun)
        if board is not None:
            self._board = TensorBoard(board, "telemetry")
        if timeline is not None:
            self._recording = Recording(timeline, self._ranks(), self._ways())
        self._begun = True

    def _own_path(self, name: str) -> Path | None:
        """Return this worker's path; with several workers, its name contains the first rank."""
        path = self._paths[name]
        if path is None:
            return None
        if self._engine_log is None or self._engine_log.processes == 1:
            return Path(path)
        rank = f"rank{self._engine_log.ranks[0]}"
        whole = Path(path)
        return (
            whole / rank
            if name == "tensorboard"
            else whole.with_name(f"{whole.stem}.{rank}{whole.suffix}")
        )

    def _write(self, kind: str, **fields: Any) -> None:
        if self._lines is not None:
            self._lines.write(kind, fields)

    # --------------------------------------------------------------- what is known

    def _watches(self, model: Any) -> bool:
        log = engine_log_of(model.distribute_strategy) if self._wants_errors else None
        return log is not None and log.is_lossy

    def _ranks(self) -> list[int]:
        return list(range(self._devices)) if self._engine_log is None else self._engine_log.ranks

    def _ways(self) -> list[str]:
        return [""] * self._devices if self._engine_log is None else self._engine_log.ways()

    def _numbers(self, whole: Mean, usual: Mean) -> dict[str, float]:
        mean = usual if usual.steps else whole
        return mean.numbers(self._devices, self._baseline)

    def _about(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "time": time.time(),
            "strategy": type(self.model.distribute_strategy).__name__,
            "devices": self._devices,
            "ranks": self._ranks(),
            "ways": self._ways(),
            "step": self._step,
            "batch": None if callable(self._batches.size) else self._batches.size,
            "baseline": self._baseline,
            "words": self._words(),
        }

    def _memory(self) -> dict[str, int]:
        """Return what weights and slots take on a replica, and what this process has held."""
        if self._lines is None:
            return {}
        optimizer = self.model.optimizer
        variables = [*self.model.variables, *(optimizer.variables if optimizer else ())]
        return {"kept": kept_by(variables), "resident": highest_memory()}

    def _words(self) -> str:
        said = []
        if self._engine_log is None:
            strategy = type(self.model.distribute_strategy).__name__
            said.append(
                "One device trains, so no gradients are sent."
                if self._devices == 1
                else f"Bytes and times of communication are not known: {strategy} uses "
                "TensorFlow's collectives, and tfscale measures those of ScaleStrategy."
            )
        elif not self._engine_log.is_measured:
            said.append(
                'Bytes and times of communication are not known: by backend="tensorflow" '
                "gradients go by TensorFlow's collectives, and tfscale measures its own."
            )
        if self._batches.size is None:
            said.append(
                "The size of a batch is not known: for samples per second, pass the global batch, "
                "Telemetry(batch=...)."
            )
        return " ".join(said)


def _fields(of: Row | Distortion) -> dict[str, Any]:
    """Return the fields of a record for a JSON line, which needs names instead of objects."""
    fields = {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}
    collectives = (
        {"collectives": list(map(str, fields["collectives"]))} if "collectives" in fields else {}
    )
    return {**fields, "bucket": str(of.bucket), **collectives}


def _without_step_ms(numbers: dict[str, float]) -> dict[str, float]:
    """Leave out the time of a step, which Keras itself shows."""
    return {name: value for name, value in numbers.items() if name != "step_ms"}
