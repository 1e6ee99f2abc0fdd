"""The demo's trainings: processes of this machine that train, and their results."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.tools.bench.run import QUIET
from tfscale.tools.launch import WorkerFailed

PROCESSES, DEVICES = 2, 2
SECONDS = 600.0  # much longer than any training takes

Show = Callable[[Sequence[dict[str, float]]], None]  # takes the logs of past epochs


@dataclass(frozen=True)
class Setup:
    """A strategy with a wire, or one device without a strategy."""

    wire: str | None

    @property
    def label(self) -> str:
        """Name in tables and pictures."""
        return f"{PROCESSES} x {DEVICES}, {self.wire}" if self.wire else "one device"


@dataclass(frozen=True)
class Training:
    """The result of a training.

    Attributes:
        label: name of the setup.
        epochs: Keras's logs of each epoch.
        step_seconds: median time of a step, on the slowest process.
        sent: bytes that all replicas have sent each other, in all steps.
        weights: all weights, one after the other.
        same_bits: whether all replicas have the same weights.
    """

    label: str
    epochs: list[dict[str, float]]
    step_seconds: float
    sent: int
    weights: Any
    same_bits: bool

    def distance(self, other: Training) -> float:
        """Return the largest difference between two weights."""
        return float(np.max(np.abs(self.weights - other.weights)))


def train(setup: Setup, epochs: int, show: Show) -> Training:
    """Run one training to its end; raise ``WorkerFailed`` if it fails."""
    with tempfile.TemporaryDirectory(prefix="tfscale-demo-") as folder:
        weights = Path(folder) / "weights.npy"
        words = [setup.wire or "none", str(epochs), str(weights)]
        count = 1 if setup.wire is None else PROCESSES
        outputs = _launched(count, words, show)
        ends = [_notes(output)[-1] for output in outputs]
        return Training(
            label=setup.label,
            epochs=_epochs(outputs[0]),
            step_seconds=max(end["step_seconds"] for end in ends),
            sent=sum(end["sent"] for end in ends),
            weights=np.load(weights),
            same_bits=len({digest for end in ends for digest in end["digests"]}) == 1,
        )


def _launched(count: int, words: Sequence[str], show: Show) -> list[str]:
    """Run the workers; return what each has printed, once all have succeeded."""
    command = [sys.executable, "-m", "tfscale", "launch", "-n", str(count), "-m"]
    outputs = [""] * count
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*command, "tfscale.tools.demo.worker", *words],
            env={**os.environ, **QUIET}, stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as launcher,
        _limited(launcher),
    ):  # fmt: skip
        assert launcher.stdout is not None
        for line in launcher.stdout:
            rank, _, text = line.partition("] ")
            outputs[int(rank.strip("[ "))] += text
            show(_epochs(outputs[0]))
        if launcher.wait():
            errors.seek(0)
            raise WorkerFailed(errors.read()[-4000:])
    return outputs


@contextlib.contextmanager
def _limited(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a process and its workers with this context, or after the time limit."""
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()


def _epochs(output: str) -> list[dict[str, float]]:
    return [note["epoch"] for note in _notes(output) if "epoch" in note]


def _notes(output: str) -> list[dict[str, Any]]:
    """Return the records that a worker has printed in whole lines, among TensorFlow's messages."""
    whole = output[: output.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in whole if line.startswith("{")]
