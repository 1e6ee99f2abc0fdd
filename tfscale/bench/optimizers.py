"""``tfscale bench optimizers``: how long updates take, and steps of AdaHessian.

Updates are of variables in memory with gradients in memory: nothing else is computed.
What others take is set against TensorFlow's own ``ResourceApplyAdam``, a single pass in
C++. Contestants take turns, and ratios are of the times within a round.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.bench import machine
from tfscale.bench.command import list_of, make_console, one_of, whole_number
from tfscale.bench.measure import in_turn

if TYPE_CHECKING:
    from rich.table import Table

Calls = dict[str, Callable[[], Any]]

PARTS = ("many", "one", "mlp", "conv")


def main(argv: Sequence[str]) -> int:
    """Runs ``tfscale bench optimizers``."""
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about = machine.describe()
    console = make_console()
    for part in arguments.parts:
        title, calls = _PARTS[part](arguments.shrink)
        console.print(make_table(title, in_turn(calls, arguments.rounds)))
    console.print("ms: median over rounds; times: median of the ratios of each round to the first")
    console.print(machine.signature(about, "optimizers", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The options of ``tfscale bench optimizers``."""
    parser = argparse.ArgumentParser(
        prog="tfscale bench optimizers",
        description="Measure updates of optimizers, and training steps of AdaHessian.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--parts", type=list_of(one_of(PARTS)), default=",".join(PARTS), metavar="NAME,...",
        help="25M parameters in many variables, 100M in one, an mlp, a conv net "
        "(default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole_number, default=15, metavar="N")
    add("--shrink", type=whole_number, default=1, metavar="K",
        help="make all K times smaller, or fewer, to try the benchmark itself")  # fmt: skip
    return parser


# ------------------------------------------------------------------- updates


def _many(shrink: int) -> tuple[str, Calls]:
    large = [(3, 3, 128, 280 // shrink), (512, 600 // shrink)]
    kernels = max(40 // shrink, 1) * large
    shapes = [shape for kernel in kernels for shape in (kernel, kernel[-1:])]
    millions = sum(map(math.prod, shapes)) / 1e6
    title = f"updates of {millions:.0f}M parameters in {len(shapes)} variables"
    return title, _updates(shapes)


def _one(shrink: int) -> tuple[str, Calls]:
    return "updates of one variable with 100M parameters", _updates([(10000, 10000 // shrink)])


def _updates(shapes: Sequence[tuple[int, ...]]) -> Calls:
    import keras
    import tensorflow as tf

    from tfscale.optimizers import LAMB, LARS

    variables = [keras.Variable(0.02 * tf.random.normal(shape)) for shape in shapes]
    gradients = [0.01 * tf.random.normal(shape) for shape in shapes]
    optimizers = {
        "LAMB": LAMB(1e-3, weight_decay=0.01),
        "LARS": LARS(1e-3, weight_decay=0.01),
        "LAMB without the op": LAMB(1e-3, weight_decay=0.01, fused=False),
        "keras Adam": keras.optimizers.Adam(1e-3),
        "keras Lamb": keras.optimizers.Lamb(1e-3),
    }
    calls: Calls = {"ResourceApplyAdam": _raw_adam(variables, gradients)}
    for name, optimizer in optimizers.items():
        optimizer.build(variables)
        calls[name] = _graph(functools.partial(optimizer.apply, gradients, variables))
    return calls


def _raw_adam(variables: list[Any], gradients: list[Any]) -> Callable[[], Any]:
    import tensorflow as tf

    states = [[tf.Variable(tf.zeros(v.shape)) for _ in range(2)] for v in variables]

    def update() -> None:
        for variable, (m, v), gradient in zip(variables, states, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=variable.value.handle, m=m.handle, v=v.handle, grad=gradient,
                beta1_power=0.5, beta2_power=0.5, lr=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-7,
            )  # fmt: skip

    return _graph(update)


def _graph(function: Callable[[], Any]) -> Callable[[], Any]:
    import tensorflow as tf

    return tf.function(function, autograph=False)  # type: ignore[no-any-return]


# --------------------------------------------------------------------- steps


def _mlp(shrink: int) -> tuple[str, Calls]:
    import keras

    layers = [keras.layers.Dense(1024 // shrink, activation="relu") for _ in range(3)]
    return "10 steps of an MLP, batch 256", _steps((784,), layers, max(256 // shrink, 2))


def _conv(shrink: int) -> tuple[str, Calls]:
    import keras

    layers: list[Any] = []
    for width in (32, 32, 64, 64, 64):
        layers += [keras.layers.Conv2D(width // min(shrink, 8), 3, activation="relu")]
        layers += [keras.layers.BatchNormalization()]
    layers += [keras.layers.GlobalAveragePooling2D()]
    return "10 steps of a conv net with batch norm, batch 64", _steps(
        (32, 32, 3), layers, max(64 // shrink, 2)
    )


def _steps(shape: tuple[int, ...], layers: list[Any], batch: int) -> Calls:
    """Ten steps at a time, as ``update_each=10`` has one that is longer than the others."""
    import keras
    import tensorflow as tf

    from tfscale.optimizers import AdaHessian
    from tfscale.strategy.feed import untuned

    body = keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(10)])
    x = tf.random.normal([batch, *shape])
    y = tf.random.uniform([batch], 0, 10, tf.int32)
    # The end of each fit would wait for a pause of tf.data's tuning, of up to seconds.
    data = untuned(tf.data.Dataset.from_tensors((x, y)).repeat())
    optimizers = {
        "SGD": keras.optimizers.SGD(1e-3),
        "AdaHessian": AdaHessian(1e-3),
        "AdaHessian, update_each=10": AdaHessian(1e-3, update_each=10),
    }
    calls: Calls = {}
    for name, optimizer in optimizers.items():
        model = keras.models.clone_model(body)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        calls[name] = functools.partial(model.fit, data, steps_per_epoch=10, verbose=0)
    return calls


# ------------------------------------------------------------------- measure

_PARTS = {"many": _many, "one": _one, "mlp": _mlp, "conv": _conv}


def make_table(title: str, times: dict[str, list[float]]) -> Table:
    """The table that users see."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("contestant")
    for column in ("ms", "min ms", "times"):
        table.add_column(column, justify="right")
    first = next(iter(times.values()))
    for name, each in times.items():
        ratio = statistics.median(a / b for a, b in zip(each, first, strict=True))
        median, least = 1e3 * statistics.median(each), 1e3 * min(each)
        table.add_row(name, f"{median:.3g}", f"{least:.3g}", f"{ratio:.2f}x")
    return table
