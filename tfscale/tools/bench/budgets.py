"""``tfscale bench budgets``: whether ten nets keep the budgets that ``Recompute`` promises.

One process plans a net for four budgets, and saves the plans. Each plan then trains in a process of
its own, without TensorFlow's pool of memory: a pool keeps what tensors have freed. The first step
has one sample; it traces the step and warms up. The benchmark counts by how much the process's
highest resident size (Linux's VmHWM) then grows. That includes all that TensorFlow's allocator does
not count, such as the code that oneDNN makes for the real batch.

In the process of the plan for half of plain's memory, steps with the plan and steps without
recomputation take turns, so that other programs slow down both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfscale.native.memory import WITHOUT_POOL
from tfscale.tools.bench import machine
from tfscale.tools.bench.budget_nets import NETS
from tfscale.tools.bench.command import (
    answer_of_process,
    bench_parser,
    list_of,
    make_console,
    one_of,
    progress,
)
from tfscale.tools.bench.memory import Growth, megabytes
from tfscale.tools.bench.run import QUIET
from tfscale.tools.bench.table import new_table

if TYPE_CHECKING:
    from rich.table import Table

BUDGETS = ("75 %", "50 %", "between", "smallest")  # the smallest that is not many times as slow
TIMED = "50 %"
STEPS = 8  # measured steps of a training
PAIRS = 6  # pairs of steps with the plan and without recomputation
MOST_TIME = 1.33


@dataclass(frozen=True)
class Planned:
    """The plan of a net for a budget.

    Args:
        net: a key of ``NETS``.
        budget: one of ``BUDGETS``.
        path: file of the plan.
        promised: the budget in bytes.
        plain: upper bound of a step's bytes without recomputation.
        overhead: recomputation, as a share of a step's operations.
        segments: recomputation of the cheapest segments; None if no segments keep the budget.
        seconds: time of planning.
    """

    net: str
    budget: str
    path: str
    promised: float
    plain: float
    overhead: float
    segments: float | None
    seconds: float


@dataclass(frozen=True)
class Trained:
    """Memory and time of a training by a plan.

    Args:
        plan: the plan.
        resident: bytes by which the resident size of the process grew.
        ratio: median time of a step, of a step without recomputation; None if it was not measured.
    """

    plan: Planned
    resident: int
    ratio: float | None = None

    @property
    def keeps(self) -> bool:
        """Whether the resident size stayed within the budget."""
        return self.resident <= self.plan.promised


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench budgets``; return the exit status."""
    if argv and argv[0] == "--plan":
        print(json.dumps([asdict(one) for one in _plan(*json.loads(argv[1]))]))
        return 0
    if argv and argv[0] == "--train":
        print(json.dumps(asdict(_train(Planned(**json.loads(argv[1]))))))
        return 0
    arguments = make_parser().parse_args(argv)
    about = machine.describe()
    console = make_console()
    found: list[Trained] = []
    try:
        with progress(console) as show, tempfile.TemporaryDirectory() as folder:
            for number, net in enumerate(arguments.nets):
                plans = _ask("--plan", [net, folder, arguments.seconds])
                for place, plan in enumerate(plans):
                    share = (number + place / len(plans)) / len(arguments.nets)
                    show(f"{net}: {plan['budget']}", share)
                    trained = _ask("--train", plan)
                    found.append(Trained(**{**trained, "plan": Planned(**trained["plan"])}))
                    if arguments.json:
                        arguments.json.write_text(json.dumps([asdict(one) for one in found]))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    console.print(make_table(found))
    kept = sum(one.keeps for one in found)
    slow = [one.plan.net for one in found if (one.ratio or 0) > MOST_TIME]
    console.print(f"{kept} of {len(found)} trainings stayed within their budgets.")
    console.print(machine.signature(about, "budgets", argv))
    if slow:
        print(f"tfscale bench: slower than {MOST_TIME}x: {', '.join(slow)}", file=sys.stderr)
    return int(kept < len(found) or bool(slow))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench budgets``."""
    parser = bench_parser(
        "budgets",
        "Train nets within four budgets of Recompute each, in fresh processes, and "
        "compare the memory of each process with its budget.",
    )
    add = parser.add_argument
    add("--nets", type=list_of(one_of(NETS)), default=",".join(NETS), metavar="NAME,...",
        help="nets to train (default: %(default)s)")  # fmt: skip
    add("--seconds", type=float, default=10.0, metavar="S",
        help="time limit for each plan (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write the numbers, after each training")
    return parser


def _ask(what: str, words: Any) -> Any:
    """Return what a new process of this command prints."""
    return answer_of_process("budgets", [what, json.dumps(words)], {**QUIET, **WITHOUT_POOL})


def make_table(found: Sequence[Trained]) -> Table:
    """Return the table that users see."""
    memory = "budget", "of plain", "resident", "of budget"
    table = new_table("", ["net"], [*memory, "again", "segments", "step", "planned"])
    before = ""
    for one in found:
        table.add_row("" if one.plan.net == before else one.plan.net, *_row(one))
        before = one.plan.net
    return table


def _row(one: Trained) -> list[str]:
    plan = one.plan
    return [
        megabytes(plan.promised),
        f"{plan.promised / plan.plain:.0%}",
        megabytes(one.resident),
        f"{one.resident / plan.promised:.0%}{'' if one.keeps else ' (more)'}",
        f"{plan.overhead:.1%}",
        "none" if plan.segments is None else f"{plan.segments:.1%}",
        "" if one.ratio is None else f"{one.ratio:.2f}x",
        f"{plan.seconds:.0f} s",
    ]


# ------------------------------------------------------------- process of a net


def _make(net: str) -> tuple[Any, tuple[Any, Any]]:
    """Return a compiled model and a batch."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    model, size = NETS[net](keras)
    model.compile(keras.optimizers.SGD(1e-5), "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, *model.input_shape[1:]), np.float32)
    return model, (x, rng.standard_normal((size, 1), np.float32))


def _plan(net: str, folder: str, seconds: float) -> Iterator[Planned]:
    import tensorflow as tf

    from tfscale.training import recompute

    model, batch = _make(net)
    known = tuple(tf.TensorSpec(part.shape, part.dtype) for part in batch)
    open_ = tuple(tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in batch)
    step = recompute.trace(model, known, open_)
    try:
        recompute.plan_budget(step, 1, seconds=seconds)
    except recompute.BudgetError as refusal:
        smallest, plain = refusal.moderate, refusal.plain
    shares = {"75 %": 0.75, "50 %": 0.5, "smallest": smallest / plain}
    shares["between"] = (shares["50 %"] + shares["smallest"]) / 2
    for budget in BUDGETS:
        promised = max(shares[budget] * plain, smallest)
        began = time.perf_counter()
        (plan,) = recompute.plan_budget(step, promised, seconds=seconds).phases
        took = time.perf_counter() - began
        path = str(Path(folder) / f"{net}, {budget}.json")
        plan.save(path)
        rival = plan if plan.events is None else plan.rival
        segments = None if rival is None else rival.overhead
        yield Planned(net, budget, path, promised, plain, plan.overhead, segments, took)


def _train(planned: Planned) -> Trained:
    import keras
    import tensorflow as tf

    from tfscale.callbacks import Recompute

    model, batch = _make(planned.net)

    def data(steps: int) -> Any:
        first = tf.data.Dataset.from_tensors(tuple(part[:1] for part in batch))
        return first.concatenate(tf.data.Dataset.from_tensors(batch).repeat(steps))

    def recompute() -> Any:
        return Recompute(plan=planned.path, example=batch, verbose=0)

    growth = Growth()
    grows = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: growth.after(batch)
    )
    model.fit(data(STEPS), verbose=0, callbacks=[grows, recompute()])
    if planned.budget != TIMED:
        return Trained(planned, growth.resident)
    model.fit(data(1), verbose=0)
    turns = _make_turns(keras, model.train_function, iter(data(PAIRS)))
    model.fit(data(PAIRS), verbose=0, callbacks=[recompute(), turns])
    return Trained(planned, growth.resident, turns.ratio())


def _make_turns(keras: Any, plain: Any, batches: Any) -> Any:
    """Return a callback that makes a step without recomputation after each step of ``fit``."""

    class Turns(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[tuple[float, float]] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            middle = time.perf_counter()
            keras.tree.map_structure(float, plain(batches))
            self.times.append((middle - self.began, time.perf_counter() - middle))

        def ratio(self) -> float:
            ours, others = zip(*self.times[1:], strict=True)
            return float(statistics.median(ours) / statistics.median(others))

    return Turns()
