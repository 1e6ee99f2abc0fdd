"""Wires by sensitivity against one wire for all layers, at equal bytes, over links of 1 Gbit/s.

Two workers train, each in a network namespace of its own. Each task begins with some epochs whose
gradients travel in fp32. Then ``quantize.wires`` chooses, and the training goes on from the same
weights with each policy.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfscale.tools.bench import digits, pruning
from tfscale.tools.bench.kept import Kept
from tfscale.tools.bench.link import Network
from tfscale.tools.launch import LocalWorkers

RATE = "1gbit"
WORKERS = 2
SECONDS = 580  # of one launch
# Wires to choose from, for the bytes of each uniform wire.
WIRES = {"int8": ("fp32", "bf16", "int8", "int4"), "int4": ("bf16", "int8", "int4", "ternary")}


class Task(NamedTuple):
    """A net, its data, and its training.

    Attributes:
        build: function that makes the net.
        data: function that returns data for training and for the test.
        rate: learning rate at the begin, which decays to 0.
        before: epochs in fp32, before wires are chosen.
        epochs: epochs with each policy.
    """

    build: Callable[[], Any]
    data: Callable[[], Any]
    rate: float
    before: int
    epochs: int


TASKS = {
    "digits": Task(digits.convolution, digits.load, 0.02, 4, 12),
    "images": Task(pruning.blocks, pruning.mnist, 0.02, 2, 4),
}


def key(task: str, seed: int) -> str:
    """Return the key of a seed's results."""
    return f"wires {task} {seed}"


def measure(task: str, seeds: Sequence[int], file: Path | None) -> list[dict[str, Any]]:
    """Return the results of each seed; the workers write new ones to the file."""
    kept = Kept(file)
    missing = [seed for seed in seeds if not kept.has(key(task, seed))]
    with tempfile.TemporaryDirectory(prefix="tfscale-wires-") as folder:
        out = file or Path(folder) / "found"
        if missing:
            _launch([str(out), task, json.dumps(missing)])
        found = Kept(out)
        return [found.of(key(task, seed), _missing) for seed in seeds]


def _launch(words: Sequence[str]) -> None:
    command = [sys.executable, "-m", "tfscale.tools.bench.wire_plans_worker", *words]
    # oneDNN writes past its buffers for the net of "images" with 125 rows: see docs/limits.md.
    variables = {"TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        Network(WORKERS, RATE) as network,
        LocalWorkers(
            command, WORKERS, hosts=network.hosts, prefixes=network.prefixes,
            environment={**network.environment, **variables},
        ) as workers,
    ):  # fmt: skip
        workers.wait(SECONDS)


def _missing() -> Any:
    raise RuntimeError("a worker ended before it had all results")


def rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a table: for each uniform wire, how plans of equal bytes compare."""
    made = []
    for uniform in WIRES:
        pairs = [(one[uniform]["uniform"], one[uniform]["plan"]) for one in found]
        off = [abs(own["counted"] / own["planned"] - 1) for _, own in pairs]
        bits = [" ".join(own["wires"]) for _, own in pairs]
        for seed, (one, own) in enumerate(pairs):
            made.append([
                uniform, str(seed), bits[seed], f"{one['planned']:,}", f"{own['planned']:,}",
                f"{off[seed]:.1%}",
                *(f"{each[name]:.4f}" for name in ("loss", "test") for each in (one, own)),
            ])  # fmt: skip
    return made


def summary(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return for each uniform wire how often the plan's losses are not above."""
    lines = []
    for uniform in WIRES:
        wins = {
            name: sum(one[uniform]["plan"][name] <= one[uniform]["uniform"][name] for one in found)
            for name in ("loss", "test")
        }
        exact = statistics.mean(one["fp32"]["loss"] for one in found)
        lines.append(
            f"bytes of {uniform}: the plan's loss is not above in {wins['loss']} of {len(found)} "
            f"seeds, its test loss in {wins['test']}; fp32 has the mean loss {exact:.4f}"
        )
    return lines
