"""``tfscale demo``: one training on one device and on four replicas, with a picture."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfscale.tools.bench.command import check_folders, ended_by_signals, make_console, whole_number
from tfscale.tools.bench.table import new_table, short
from tfscale.tools.demo.training import DEVICES, PROCESSES, Setup, Training, train
from tfscale.tools.launch import WorkerFailed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

# modules, and the packages that contain them
_NEEDED = {"tensorflow": "tensorflow-cpu", "sklearn": "scikit-learn"}
_FOR_THE_PICTURE = {"matplotlib": "matplotlib"}

SETUPS = (Setup(None), Setup("fp32"), Setup("int8"))


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    arguments = _parser().parse_args(argv)
    if absent := _absent(_NEEDED):
        print(f"tfscale demo: error: {_install_advice(absent)}", file=sys.stderr)
        return 1
    console = make_console()
    if absent := _absent(_FOR_THE_PICTURE):
        console.print(f"There will be no picture: {_install_advice(absent)}", soft_wrap=True)
    console.print(
        f"A small convolutional network learns handwritten digits for {arguments.epochs} epochs:\n"
        f"on one device, then on {PROCESSES} processes x {DEVICES} devices of this machine."
    )
    try:
        check_folders(arguments.out)
        with ended_by_signals():
            trainings = train_all(console, arguments.epochs)
    except (WorkerFailed, OSError) as error:
        print(f"tfscale demo: error: {error}", file=sys.stderr)
        return 1
    console.print(make_table(trainings))
    same = all(training.same_bits for training in trainings)
    console.print(verdict(same), soft_wrap=True)
    _picture(console, trainings, arguments.out)
    return 0 if same else 1


def _absent(modules: Mapping[str, str]) -> list[str]:
    """Return the missing packages, without importing any: TensorFlow takes seconds."""
    return [modules[name] for name in modules if importlib.util.find_spec(name) is None]


def _install_advice(packages: Sequence[str]) -> str:
    return f"not installed: {', '.join(packages)}. pip install {' '.join(packages)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfscale demo", description="One training, on one device and on four replicas."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("tfscale-demo.png"), help="the picture (%(default)s)"
    )
    parser.add_argument("--epochs", type=whole_number, default=12, help="(%(default)s)")
    return parser


def train_all(console: Console, epochs: int) -> list[Training]:
    """Train one setup after the other, since they share the processors; show a bar for each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[setup]:21}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        bars = [
            progress.add_task("", total=epochs, start=False, setup=setup.label) for setup in SETUPS
        ]
        trainings = []
        for setup, bar in zip(SETUPS, bars, strict=True):
            progress.start_task(bar)
            progress.update(bar, description="TensorFlow starts")
            show = functools.partial(_show, progress, bar)
            trainings.append(train(setup, epochs, show))
            progress.stop_task(bar)
    return trainings


def _show(progress: Progress, bar: TaskID, epochs: Sequence[dict[str, float]]) -> None:
    if epochs:
        accuracy = f"loss {epochs[-1]['loss']:.3f}, accuracy {epochs[-1]['val_accuracy']:.1%}"
        progress.update(bar, completed=len(epochs), description=accuracy)


def make_table(trainings: Sequence[Training]) -> Table:
    """Return a table with a row for each training; the first one is the reference."""
    numbers = "accuracy", "MB sent by all", "ms per step", "farthest weight from one device's"
    table = new_table("", [""], numbers, pad_edge=False)
    for training in trainings:
        table.add_row(
            training.label,
            f"{training.epochs[-1]['val_accuracy']:.2%}",
            short(training.sent / 1e6),
            short(1e3 * training.step_seconds),
            "" if training is trainings[0] else f"{training.distance(trainings[0]):.0e}",
        )
    return table


def verdict(same: bool) -> str:
    """Return the result of the check, and the meaning of the times."""
    if not same:
        return "[red]Replicas ended with different weights: that is a bug, please report it.[/red]"
    return (
        "All replicas ended with the same weights, to the bit. Here they share the\n"
        "processors of one machine, so they cannot be faster than one device."
    )


def _picture(console: Console, trainings: Sequence[Training], path: Path) -> None:
    if _absent(_FOR_THE_PICTURE):
        return
    from tfscale.tools.demo.picture import draw

    draw(trainings).savefig(path, dpi=110)
    console.print(f"Picture: {path.absolute()}", soft_wrap=True)
