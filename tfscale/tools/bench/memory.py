"""``tfscale bench memory``: how much memory a training step takes, with and without Recompute.

Each training runs in a process of its own. Its first step has one sample: it traces and warms up.
Then weights, the batch and TensorFlow itself are in memory. The benchmark counts what the next
steps need beyond that in two ways: by TensorFlow's allocator, which counts the memory in use, and
by the process's highest resident size (Linux's VmHWM), which also counts memory that TensorFlow
holds without using it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfscale.support.resident import highest_memory
from tfscale.tools.bench import machine
from tfscale.tools.bench.command import (
    answer_of_process,
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

    from tfscale.tools.bench.run import Show

STEPS = 6


def _mlp(keras: Any) -> tuple[Any, int]:
    layers = keras.layers
    x = inputs = keras.Input((1024,))
    for _ in range(24):
        x = layers.Dense(1024, activation="gelu")(x)
    return keras.Model(inputs, layers.Dense(1)(x)), 4096


def _conv(keras: Any) -> tuple[Any, int]:
    layers = keras.layers
    x = inputs = keras.Input((64, 64, 32))
    for _ in range(12):
        x = layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x))), 48


def _transformer(keras: Any) -> tuple[Any, int]:
    layers = keras.layers
    x = inputs = keras.Input((128, 256))
    for _ in range(12):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(8, 32)(h, h)
        h = layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(256)(h)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x))), 32


MODELS: dict[str, Callable[[Any], tuple[Any, int]]] = {
    "mlp": _mlp,
    "conv": _conv,
    "transformer": _transformer,
}
# Budget of each model, as a share of the plain step's memory.
FRACTIONS = {"mlp": 0.3, "conv": 0.45, "transformer": 0.33}

# This allocator of TensorFlow counts memory on every processor. oneDNN's allocator counts, too, but
# TensorFlow uses it only together with oneDNN.
COUNTED = {
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Asked:
    """Training to measure.

    Args:
        model: a key of ``MODELS``.
        replicas: number of replicas on logical CPUs.
        scale: share of the batch that is used.
        fraction: budget as a share of the plain step's memory.
        between: budget between the smallest possible (0) and the plain step's memory (1). If
            this and ``fraction`` are None, training runs without Recompute.
    """

    model: str
    replicas: int = 1
    scale: float = 1.0
    fraction: float | None = None
    between: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the training runs without Recompute."""
        return self.fraction is None and self.between is None


@dataclass(frozen=True)
class Found:
    """Result of a training: bytes and seconds of all replicas together.

    Args:
        allocated: bytes that TensorFlow allocated.
        resident: bytes by which the resident size grew.
        step: seconds of the shortest step.
        loss: loss of the last step.
        budget: bytes of the budget; None without Recompute, as the arguments below.
        predicted: bytes that the plan predicted.
        overhead: recomputation, as a share of a step.
    """

    allocated: int
    resident: int
    step: float
    loss: float
    budget: float | None = None
    predicted: int | None = None
    overhead: float | None = None


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench memory``; return the exit status."""
    if argv and argv[0] == "--training":
        print(json.dumps(asdict(_train(Asked(**json.loads(argv[1]))))))
        return 0
    arguments = make_parser().parse_args(argv)
    about = machine.describe()
    console = make_console()
    for model, replicas in itertools.product(arguments.models, arguments.replicas):
        trainings = list(_trainings(model, replicas, arguments))
        try:
            with progress(console) as show:
                rounds = _measure_all(trainings, arguments.rounds, show)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"tfscale bench: error: {error}", file=sys.stderr)
            return 1
        console.print(make_table(trainings, rounds))
    console.print(
        "allocated and resident: most bytes of all rounds, and their share of the plain "
        "training's;\n"
        "of: allocated bytes as a share of the budget; off: error of the predicted bytes;\n"
        "step: shortest step compared with the plain one"
    )
    console.print(machine.signature(about, "memory", argv))
    return 0


def _measure_all(trainings: Sequence[Asked], rounds: int, show: Show) -> list[list[Found]]:
    found: list[list[Found]] = []
    for number in range(rounds):
        found.append([])
        for place, asked in enumerate(trainings):
            what = f"{asked.model}, {_on(asked.replicas)}: {_how(asked)}"
            show(what, (number + place / len(trainings)) / rounds)
            found[-1].append(measure(asked))
    return found


def _trainings(model: str, replicas: int, arguments: argparse.Namespace) -> Iterator[Asked]:
    asked = Asked(model, replicas, arguments.scale)
    yield asked
    count = arguments.budgets
    if count:
        yield from (replace(asked, between=i / max(1, count - 1)) for i in range(count))
    else:
        fractions = arguments.fractions or (FRACTIONS[model],)
        yield from (replace(asked, fraction=fraction) for fraction in fractions)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench memory``."""
    parser = bench_parser(
        "memory", "Measure the memory of training steps, with and without Recompute."
    )
    add = parser.add_argument
    add("--models", type=list_of(one_of(MODELS)), default=",".join(MODELS), metavar="NAME,...",
        help="models to train (default: %(default)s)")  # fmt: skip
    add("--fractions", type=list_of(_share), metavar="F,...",
        help="budgets, as shares of the plain step's memory "
        f"(default: {', '.join(f'{k} {v}' for k, v in FRACTIONS.items())})")  # fmt: skip
    add("--budgets", type=whole_number, default=0, metavar="N",
        help="use N budgets instead of --fractions, from the smallest possible (0%% up) to the "
        "plain step's memory (100%% up)")  # fmt: skip
    add("--replicas", type=list_of(whole_number), default="1,2", metavar="K,...",
        help="replicas on logical CPUs of one process, each with a whole batch "
        "(default: %(default)s)")  # fmt: skip
    add("--scale", type=_share, default=1.0, metavar="S",
        help="share of the batch that is used (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole_number, default=1, metavar="N",
        help="turns of each training (default: %(default)s)")  # fmt: skip
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return value


def measure(asked: Asked) -> Found:
    """Train in a new process, for at most half an hour; return the result."""
    words = "--training", json.dumps(asdict(asked))
    return Found(**answer_of_process("memory", words, COUNTED))


def make_table(trainings: Sequence[Asked], rounds: Sequence[Sequence[Found]]) -> Table:
    """Return the table that users see."""
    model, replicas = trainings[0].model, trainings[0].replicas
    title = f"{model}, {_on(replicas)}"
    sizes = "budget", "allocated", "", "of", "predicted", "off", "resident", ""
    table = new_table(title, ["Recompute"], [*sizes, "step", "again", "loss"])
    plain = [each[0] for each in rounds]
    for asked, found in zip(trainings, zip(*rounds, strict=True), strict=True):
        table.add_row(*_row(asked, found, plain))
    return table


def _row(asked: Asked, found: Sequence[Found], plain: Sequence[Found]) -> list[str]:
    allocated = max(one.allocated for one in found)
    resident = max(one.resident for one in found)
    ratio = min(one.step for one in found) / min(one.step for one in plain)
    losses = {f"{one.loss:.9g}" for one in found}
    row = {
        "how": _how(asked),
        "budget": "",
        "allocated": megabytes(allocated),
        "share": f"{allocated / max(one.allocated for one in plain):.0%}",
        "of": "",
        "predicted": "",
        "off": "",
        "resident": megabytes(resident),
        "resident share": f"{resident / max(one.resident for one in plain):.0%}",
        "step": f"{ratio:.2f}x",
        "again": "",
        "loss": " or ".join(sorted(losses)),
    }
    one = found[0]
    if one.budget and one.predicted and one.overhead is not None:
        row["budget"] = megabytes(one.budget)
        row["of"] = f"{allocated / one.budget:.0%}"
        row["predicted"] = megabytes(one.predicted)
        row["off"] = f"{one.predicted / allocated - 1:+.0%}"
        row["again"] = f"{one.overhead:.0%}"
    return list(row.values())


def megabytes(size: float) -> str:
    """Return a number of bytes as text, such as ``12 MB``."""
    return f"{size / 1e6:.0f} MB"


def _on(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def _how(asked: Asked) -> str:
    if asked.is_plain:
        return "without"
    if asked.fraction is not None:
        return f"fraction {asked.fraction:g}"
    return "the smallest" if asked.between == 0 else f"{asked.between:.0%} up"


# ---------------------------------------------------------- process of a training


def _train(asked: Asked) -> Found:
    import keras
    import numpy as np
    import tensorflow as tf

    replicas = asked.replicas
    strategy = _strategy(tf, replicas)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, size = MODELS[asked.model](keras)
        model.compile(keras.optimizers.SGD(1e-5), "mse", jit_compile=False)
    size = max(replicas, int(size * asked.scale)) * replicas
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, *model.input_shape[1:]), np.float32)
    y = rng.standard_normal((size, 1), np.float32)
    first = tf.data.Dataset.from_tensors((x[:replicas], y[:replicas]))
    data = first.concatenate(tf.data.Dataset.from_tensors((x, y)).repeat(STEPS))
    recompute = None if asked.is_plain else _recompute(model, data, asked, (x, y))
    meter = make_meter(keras, tf)
    model.fit(data, verbose=0, callbacks=[meter, *([recompute] if recompute else [])])
    found = Found(meter.allocated, meter.resident, min(meter.times[1:]), meter.loss)
    if recompute is None:
        return found
    plan = recompute.plan
    return replace(
        found,
        budget=(plan.budget or 0) * replicas,
        predicted=plan.peak * replicas,
        overhead=plan.overhead,
    )


def _recompute(model: Any, data: Any, asked: Asked, example: Any) -> Any:
    from tfscale.callbacks import Recompute
    from tfscale.training.recompute import BudgetError

    if asked.between is None:
        return Recompute(fraction=asked.fraction, example=example, verbose=0)
    try:
        model.fit(data, verbose=0, callbacks=[Recompute(budget=1, example=example, verbose=0)])
    except BudgetError as refusal:
        smallest, plain = refusal.smallest, refusal.plain
    budget = smallest + asked.between * (plain - smallest)
    return Recompute(budget=budget, example=example, verbose=0)


def _strategy(tf: Any, replicas: int) -> Any:
    if replicas == 1:
        return tf.distribute.get_strategy()
    machine.split_cpu(replicas)
    from tfscale import ScaleStrategy

    return ScaleStrategy(devices=[f"CPU:{i}" for i in range(replicas)])


def make_meter(keras: Any, tf: Any) -> Any:
    """Return a callback that measures memory and time of all steps after the first."""

    def in_use() -> dict[str, int]:
        return tf.config.experimental.get_memory_info("CPU:0")  # type: ignore[no-any-return]

    class Meter(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.allocated = self.resident = 0
            self._growth = Growth()
            self.loss = 0.0
            self.times: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                tf.config.experimental.reset_memory_stats("CPU:0")
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times.append(time.perf_counter() - self.began)
            self.loss = float(logs["loss"])
            self.resident = self._growth.after(batch)
            if batch == 0:
                tf.config.experimental.reset_memory_stats("CPU:0")
                self.held = in_use()["current"]
            self.allocated = in_use()["peak"] - self.held

    return Meter()


class Growth:
    """Growth of the process's highest resident size after the first step."""

    def after(self, batch: int) -> int:
        """Return the growth in bytes after a step, the number of which is its batch's."""
        if batch == 0:
            self._settled = settle()
        self.resident = highest_memory() - self._settled
        return self.resident


def settle() -> int:
    """Free unused memory, reset the highest resident size, and return the resident size."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return highest_memory()
