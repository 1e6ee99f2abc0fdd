"""``tfscale bench telemetry``: how long steps of ``fit`` take with telemetry and without.

One model trains in turns with and without telemetry. It trains twice without: the difference of
these two turns is the noise of the measurement. So the benchmark also measures the time inside the
callback's methods.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfscale.tools.bench import machine
from tfscale.tools.bench.command import (
    bench_parser,
    list_of,
    make_console,
    one_of,
    progress,
    whole_number,
)
from tfscale.tools.bench.table import new_table

if TYPE_CHECKING:
    from rich.table import Table

PARTS = ("one", "replicas")
UNTIMED = 3  # first steps of each turn, of which the first traces


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, and the share that telemetry's methods take."""

    step: float
    inside: float


Turns = dict[str, Callable[[], StepTimes]]


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench telemetry``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about = machine.describe()
    console = make_console()
    _make_devices()
    with tempfile.TemporaryDirectory(prefix="tfscale-telemetry-") as folder:
        for part in arguments.parts:
            title, turns = _turns(part, arguments, Path(folder))
            rounds: list[list[StepTimes]] = []
            with progress(console) as show:
                for number in range(1 + arguments.rounds):
                    show(title, number / (1 + arguments.rounds))
                    rounds.append([turn() for turn in turns.values()])
            each = zip(*rounds[1:], strict=True)
            console.print(make_table(title, dict(zip(turns, each, strict=True))))
    console.print(
        "ms: median over rounds of a step; more: extra time compared with the first turn of a "
        "round,\nmedian over rounds and its 95 % interval; inside: share of the time in the "
        "callback's methods"
    )
    console.print(machine.signature(about, "telemetry", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench telemetry``."""
    parser = bench_parser("telemetry", "Measure steps of fit with telemetry and without.")
    add = parser.add_argument
    add("--parts", type=list_of(one_of(PARTS)), default=",".join(PARTS), metavar="NAME,...",
        help="one: one device; replicas: two replicas of this process (default: %"
        "(default)s)")  # fmt: skip
    add("--model", default="conv", metavar="NAME", help="a model of tfscale bench fit: conv, "
        "dense, deep, wide, tiny (default: %(default)s)")  # fmt: skip
    add("--wire", default="int8", metavar="NAME",
        help="wire of the part replicas (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole_number, default=40, metavar="N",
        help="turns with and without telemetry (default: %(default)s)")  # fmt: skip
    add("--steps", type=whole_number, default=100, metavar="N",
        help="steps of each epoch; a turn has two epochs (default: %(default)s)")  # fmt: skip
    return parser


def _turns(part: str, arguments: argparse.Namespace, folder: Path) -> tuple[str, Turns]:
    import tensorflow as tf

    from tfscale import ScaleStrategy
    from tfscale.callbacks import Telemetry
    from tfscale.tools.bench.fit_worker import MODELS, make_data, make_model

    strategy = tf.distribute.get_strategy()
    if part == "replicas":
        strategy = ScaleStrategy("ring", arguments.wire, ["CPU:0", "CPU:1"])
    batch = MODELS[arguments.model]()[-1] * strategy.num_replicas_in_sync

    with strategy.scope():
        model = make_model(arguments.model)
    data = make_data(model, batch)

    def training(*callbacks: Any) -> Callable[[], StepTimes]:
        return lambda: _turn(model, data, arguments.steps, callbacks)

    everything = Telemetry(folder / f"{part}.jsonl", folder / part)
    turns = {
        "without": training(),
        "without, again": training(),
        "progress bar alone": training(Telemetry()),
        "JSON lines, TensorBoard": training(everything),
    }
    devices = "one device" if part == "one" else f"two replicas, {arguments.wire}"
    return f"fit of {arguments.model!r}, {devices}, batch {batch}", turns


def _turn(model: Any, data: Any, steps: int, callbacks: Sequence[Any]) -> StepTimes:
    """Train one turn and return its times, between the beginnings of two steps.

    The end of the first epoch is between them.
    """
    import keras

    begins: list[float] = []
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: begins.append(time.perf_counter())
    )
    calls: list[tuple[float, float]] = []
    for callback in callbacks:
        _clock(callback, calls)
    model.fit(data, steps_per_epoch=steps, epochs=2, verbose=0, callbacks=[noted, *callbacks])
    first, last = begins[UNTIMED], begins[-1]
    inside = sum(end - begin for begin, end in calls if first <= begin < last)
    return StepTimes((last - first) / (len(begins) - 1 - UNTIMED), inside / (last - first))


def _clock(callback: Any, calls: list[tuple[float, float]]) -> None:
    """Record begin and end of each call of the callback's methods by Keras."""

    def clocked(method: Any, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        method(*args, **kwargs)
        calls.append((begin, time.perf_counter()))

    for name in vars(type(callback)):
        if name.startswith("on_"):
            method = functools.partial(getattr(type(callback), name), callback)
            setattr(callback, name, functools.partial(clocked, method))


def make_table(title: str, turns: dict[str, Sequence[StepTimes]]) -> Table:
    """Return the table that users see."""
    table = new_table(title, ["telemetry"], ["ms", "min ms", "more", "inside"])
    first = next(iter(turns.values()))
    for name, each in turns.items():
        ratios = sorted(turn.step / its.step for turn, its in zip(each, first, strict=True))
        steps = [1e3 * turn.step for turn in each]
        median, least = statistics.median(steps), min(steps)
        inside = statistics.median(turn.inside for turn in each)
        table.add_row(name, f"{median:.3f}", f"{least:.3f}", _more(ratios), f"{100 * inside:.2f}%")
    return table


def _more(ratios: Sequence[float]) -> str:
    """Return the median of sorted ratios and its 95 % interval, by order statistics, as text."""
    count = len(ratios)
    beside = 0.98 * count**0.5
    low = ratios[max(0, round(count / 2 - beside))]
    high = ratios[min(count - 1, round(count / 2 + beside))]
    return (
        f"{100 * (statistics.median(ratios) - 1):+.2f}% "
        f"({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})"
    )


def _make_devices() -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    if not tf.config.get_logical_device_configuration(cpu):
        machine.split_cpu(2)
