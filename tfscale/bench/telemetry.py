"""``tfscale bench telemetry``: how long steps of ``fit`` take with telemetry and without.

All trainings take turns in one process, and one of them is there twice: what the two differ by
is what this measurement cannot see.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfscale.bench import machine
from tfscale.bench.command import list_of, make_console, one_of, whole_number

if TYPE_CHECKING:
    from rich.table import Table

PARTS = ("one", "replicas")
UNTIMED = 3  # steps of each turn: the first traces

Turns = dict[str, Callable[[], float]]


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about = machine.describe()
    console = make_console()
    _make_devices()
    with tempfile.TemporaryDirectory(prefix="tfscale-telemetry-") as folder:
        for part in arguments.parts:
            title, turns = _turns(part, arguments, Path(folder))
            rounds = [[turn() for turn in turns.values()] for _ in range(1 + arguments.rounds)]
            times = zip(*rounds[1:], strict=True)
            console.print(make_table(title, dict(zip(turns, times, strict=True))))
    console.print(
        "ms: median over rounds of a step; more: median of the ratios of each round to the first"
    )
    console.print(machine.signature(about, "telemetry", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfscale bench telemetry",
        description="Measure steps of fit with telemetry and without.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--parts", type=list_of(one_of(PARTS)), default=",".join(PARTS), metavar="NAME,...",
        help="one device, two replicas of this process (default: %(default)s)")  # fmt: skip
    add("--model", default="conv", metavar="NAME", help="one of tfscale bench fit's: conv, dense, "
        "deep, tiny (default: %(default)s)")  # fmt: skip
    add("--wire", default="int8", metavar="NAME", help="of the replicas (default: %(default)s)")
    add("--rounds", type=whole_number, default=15, metavar="N")
    add("--steps", type=whole_number, default=200, metavar="N",
        help="of each epoch; a turn has two (default: %(default)s)")  # fmt: skip
    return parser


def _turns(part: str, arguments: argparse.Namespace, folder: Path) -> tuple[str, Turns]:
    import tensorflow as tf

    from tfscale import ScaleStrategy
    from tfscale.bench.fit_worker import MODELS, make_data, make_model
    from tfscale.callbacks import Telemetry

    strategy = tf.distribute.get_strategy()
    if part == "replicas":
        strategy = ScaleStrategy("ring", arguments.wire, ["CPU:0", "CPU:1"])
    batch = MODELS[arguments.model]()[-1] * strategy.num_replicas_in_sync

    def training(*callbacks: Any) -> Callable[[], float]:
        with strategy.scope():
            model = make_model(arguments.model)
        data = make_data(model, batch)
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


def _turn(model: Any, data: Any, steps: int, callbacks: Sequence[Any]) -> float:
    """Seconds of a step, from its beginning to the next one's; one end of an epoch is in it."""
    import keras

    begins: list[float] = []
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: begins.append(time.perf_counter())
    )
    model.fit(data, steps_per_epoch=steps, epochs=2, verbose=0, callbacks=[noted, *callbacks])
    return (begins[-1] - begins[UNTIMED]) / (len(begins) - 1 - UNTIMED)


def make_table(title: str, times: dict[str, Sequence[float]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("telemetry")
    for column in ("ms", "min ms", "more"):
        table.add_column(column, justify="right")
    first = next(iter(times.values()))
    for name, each in times.items():
        ratio = statistics.median(a / b for a, b in zip(each, first, strict=True))
        median, least = 1e3 * statistics.median(each), 1e3 * min(each)
        table.add_row(name, f"{median:.3f}", f"{least:.3f}", f"{100 * (ratio - 1):+.2f}%")
    return table


def _make_devices() -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    if not tf.config.get_logical_device_configuration(cpu):
        machine.split_cpu(2)
