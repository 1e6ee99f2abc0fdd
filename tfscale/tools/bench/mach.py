"""``tfscale bench mach``: MACH, full softmax and sampled softmax repair spelling in equal time.

All contestants have the same layers before the last one, the same optimizer and as many seconds
of training. MACH's repetitions share these seconds. A second part measures the search for the best
classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.tools.bench import machine, spelling
from tfscale.tools.bench.command import list_of, make_console, one_of, whole_number

CONTESTANTS = ("mach", "shared", "full", "sampled")
ESTIMATORS = ("unbiased", "logits")
RATE = 0.002
_TEST, _TEST_SEED, _PART = 4096, 10**6, 256
_FLOATS = 4  # a weight, its gradient, and Adam's two numbers


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a contestant.

    Attributes:
        head: parameters of the last layers.
        megabytes: memory of a last layer that is trained, with gradient and optimizer.
        steps: steps of training, all repetitions together.
        top1: share of words that are repaired, in %.
        top5: share of words that are among the five best, in %.
    """

    name: str
    head: int
    megabytes: float
    steps: int
    top1: float
    top5: float


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench mach``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about, console = machine.describe(), make_console()
    contestants = [name for name in arguments.contestants if name != "none"]
    try:
        words = spelling.load(arguments.words) if contestants else []
    except OSError as error:
        print(f"tfscale bench: error: {error}")
        return 1
    if words:
        task = Task(spelling.Words(words[:: arguments.one_in]), arguments)
        results = [result for name in contestants for result in task.run(name)]
        console.print(make_table(results, task))
        if arguments.json:
            arguments.json.write_text(json.dumps([dataclasses.asdict(r) for r in results]))
    if arguments.search:
        console.print(search(arguments.search, arguments.repetitions, arguments.buckets))
    console.print(machine.signature(about, "mach", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench mach``."""
    parser = argparse.ArgumentParser(
        prog="tfscale bench mach",
        description="Compare MACH with full and sampled softmax on spelling repair.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--contestants", type=list_of(one_of([*CONTESTANTS, "none"])), metavar="NAME,...",
        default=",".join(CONTESTANTS), help="some of mach, shared (MACH with a shared trunk), "
        "full (softmax), sampled (softmax); none (default: %(default)s)")  # fmt: skip
    add("--words", type=Path, metavar="FILE",
        help="list of words (default: Debian's largest, or symspellpy's)")  # fmt: skip
    add("--one-in", type=whole_number, default=1, metavar="N", help="take one word in N")
    add("--seconds", type=float, default=120.0, metavar="S",
        help="training of each contestant (default: %(default)s)")  # fmt: skip
    add("--buckets", type=whole_number, default=1024, metavar="B", help="(default: %(default)s)")
    add("--repetitions", type=whole_number, default=4, metavar="R", help="(default: %(default)s)")
    add("--width", type=whole_number, default=256, metavar="N",
        help="inputs of the last layer (default: %(default)s)")  # fmt: skip
    add("--batch", type=whole_number, default=256, metavar="N", help="(default: %(default)s)")
    add("--samples", type=whole_number, default=1024, metavar="N",
        help="classes that sampled softmax draws in a step (default: %(default)s)")  # fmt: skip
    add("--search", type=whole_number, default=0, metavar="K",
        help="also search for the ten best of K classes (default: no)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return parser


class Task:
    """Spelling repair with one set of options.

    Args:
        words: the words, which are the classes.
        options: options of the command line.
    """

    def __init__(self, words: spelling.Words, options: argparse.Namespace) -> None:
        self.words, self.options, self.classes = words, options, len(words.words)
        self._test = words.misspelt(np.random.default_rng(_TEST_SEED), _TEST)
        self._trunk = spelling.trunk(options.width)

    def run(self, name: str) -> list[Result]:
        """Train a contestant, and judge it; MACH by two estimators, on the same models."""
        import keras

        keras.utils.set_random_seed(1)
        if name in ("mach", "shared"):
            return self._mach(name, name == "shared")
        return [self._softmax(name, name == "sampled")]

    def _mach(self, name: str, shared: bool) -> list[Result]:
        from tfscale.training.extreme import MACH

        buckets, repetitions = self.options.buckets, self.options.repetitions
        made = MACH(self._build, self.classes, buckets, repetitions, shared_trunk=shared)
        made.compile(_optimizer())
        trainings = 1 if shared else repetitions
        steps = self._train(made.fit, trainings)
        outputs = buckets * repetitions
        results = []
        for made.estimator in ESTIMATORS:
            results.append(
                self._result(
                    f"{name}, {made.estimator}",
                    outputs,
                    outputs // trainings,
                    steps,
                    lambda x: made.top(x, 5, batch_size=_PART)[1],
                )
            )
        return results

    def _build(self, outputs: int) -> Any:
        import keras

        inputs, hidden = self._trunk()
        return keras.Model(inputs, keras.layers.Dense(outputs)(hidden))

    def _softmax(self, name: str, sampled: bool) -> Result:
        import keras

        model = self._build(self.classes)
        if sampled:
            model = _sampled(model, self.options.samples)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(_optimizer(), None if sampled else loss)
        steps = self._train(model.fit, 1)

        def search(x: Any) -> Any:
            parts = (model(x[i : i + _PART], training=False) for i in range(0, len(x), _PART))
            return np.concatenate([keras.ops.top_k(part, 5)[1] for part in parts])

        return self._result(name, self.classes, self.classes, steps, search)

    def _train(self, fit: Any, trainings: int) -> int:
        import tensorflow as tf

        columns = 3 * (spelling.LONGEST + 2)
        spec = tf.TensorSpec([None, columns], tf.int32), tf.TensorSpec([None], tf.int32)
        data = tf.data.Dataset.from_generator(
            lambda: self.words.batches(self.options.batch, 1), output_signature=spec
        ).prefetch(4)
        until = _until(self.options.seconds / trainings)
        fit(data, steps_per_epoch=10**6, verbose=0, shuffle=False, callbacks=[until])
        return int(until.steps)

    def _result(
        self, name: str, outputs: int, at_once: int, steps: int, search: Callable[[Any], Any]
    ) -> Result:
        x, true = self._test
        hits = search(x) == true[:, None]
        weights = self.options.width + 1
        memory = at_once * weights * _FLOATS * 4 / 1e6
        top1, top5 = (100 * float(hits[:, :k].any(1).mean()) for k in (1, 5))
        return Result(name, outputs * weights, memory, steps, top1, top5)


def _optimizer() -> Any:
    import keras

    return keras.optimizers.Adam(RATE)


def _until(seconds: float) -> Any:
    """Return a callback that ends each ``fit`` after a time, counted from its second step."""
    import keras

    class Until(keras.callbacks.Callback):
        steps, _end = 0, 0.0

        def on_train_begin(self, logs: Any = None) -> None:
            self._end = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            self._end = self._end or time.monotonic() + seconds
            self.model.stop_training = time.monotonic() > self._end

    return Until()


def _sampled(model: Any, samples: int) -> Any:
    """Return a model that trains the last layer of another one on sampled classes."""
    import keras
    import tensorflow as tf

    head = model.layers[-1]
    hidden = keras.Model(model.inputs, head.input)

    class Sampled(keras.Model):
        def call(self, x: Any, training: bool = False) -> Any:
            return hidden(x) if training else head(hidden(x))

        def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
            losses = tf.nn.sampled_softmax_loss(
                tf.transpose(head.kernel), head.bias, tf.cast(y[:, None], tf.int64), y_pred,
                samples, head.units,
            )  # fmt: skip
            return tf.reduce_mean(losses)

    made = Sampled()
    made.parts = [hidden, head]
    return made


def make_table(results: Sequence[Result], task: Task) -> Any:
    """Return the table that users see."""
    from rich import box
    from rich.table import Table

    options = task.options
    table = Table(
        title=f"spelling repair, {task.classes:,} words, {options.seconds:g} s of training each, "
        f"B={options.buckets}, R={options.repetitions}", box=box.SIMPLE_HEAD, pad_edge=False,
        title_justify="left", title_style="bold",
    )  # fmt: skip
    table.add_column("contestant")
    for name in ("last layers, parameters", "MB in training", "steps", "top-1, %", "top-5, %"):
        table.add_column(name, justify="right")
    for each in results:
        table.add_row(
            each.name, f"{each.head:,}", f"{each.megabytes:,.1f}", f"{each.steps:,}",
            f"{each.top1:.1f}", f"{each.top5:.1f}",
        )  # fmt: skip
    return table


# ---------------------------------------------------------------------------
# The search.


def search(classes: int, repetitions: int, buckets: int, samples: int = 128) -> str:
    """Return queries per second, and the memory, of a search for the ten best classes.

    A sample's true class has larger logits than others by a random amount in each repetition.
    """
    import tensorflow as tf

    from tfscale.training.extreme.hashing import buckets_of, keys_of
    from tfscale.training.extreme.search import Search

    rng, rows = np.random.default_rng(0), np.arange(samples)
    table = np.stack([buckets_of(keys_of(classes), buckets, 0, r) for r in range(repetitions)])
    logits = rng.standard_normal([repetitions, samples, buckets]).astype("float32")
    true = rng.integers(0, classes, samples)
    for r in range(repetitions):
        logits[r, rows, table[r, true]] += 16 * rng.random(samples)
    values = tf.nn.softmax(logits)
    found, lines = Search(table, buckets, "mean"), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for candidates in (0, 4, 8):
        found.top(values, 10, candidates)
        start = time.perf_counter()
        _, labels = found.top(values, 10, candidates)
        rate = samples / (time.perf_counter() - start)
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        right = (labels[:, 0] == true).mean()
        lines.append(
            f"ten best of {classes:,} classes, R={repetitions}, B={buckets:,}, candidates="
            f"{candidates}: {rate:,.0f} queries/s, {more:,.0f} MB more at the peak, "
            f"true class first for {right:.0%}"
        )
    return "\n".join(lines)
