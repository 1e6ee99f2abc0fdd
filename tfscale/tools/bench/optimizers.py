"""``tfscale bench optimizers``: how long updates take, and steps of AdaHessian.

An update changes variables in memory by gradients in memory; nothing else is computed. Times of
updates are compared with TensorFlow's own ``ResourceApplyAdam``, a single pass in C++.
Contestants take turns, and ratios compare times of the same round.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.tools.bench import machine
from tfscale.tools.bench.command import bench_parser, list_of, make_console, one_of, whole_number
from tfscale.tools.bench.measure import in_turn
from tfscale.tools.bench.table import new_table

if TYPE_CHECKING:
    from rich.table import Table

Calls = dict[str, Callable[[], Any]]

PARTS = ("many", "one", "mlp", "conv")


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench optimizers``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about = machine.describe()
    console = make_console()
    for part in arguments.parts:
        title, calls = _PARTS[part](arguments.shrink)
        console.print(make_table(title, in_turn(calls, arguments.rounds)))
    console.print(
        "ms: median over rounds; times: time compared with the first, median of the ratios by round"
    )
    console.print(machine.signature(about, "optimizers", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench optimizers``."""
    parser = bench_parser(
        "optimizers", "Measure updates of optimizers, and training steps of AdaHessian."
    )
    add = parser.add_argument
    add("--parts", type=list_of(one_of(PARTS)), default=",".join(PARTS), metavar="NAME,...",
        help="many: 25M parameters in many variables; one: 100M parameters in one variable; mlp: "
        "a multilayer perceptron; conv: a convolutional network (default: %"
        "(default)s)")  # fmt: skip
    add("--rounds", type=whole_number, default=15, metavar="N",
        help="turns of each contestant (default: %(default)s)")  # fmt: skip
    add("--shrink", type=whole_number, default=1, metavar="K",
        help="make models and batches K times smaller, to try the benchmark itself")  # fmt: skip
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

    from tfscale.training.optimizers import LAMB, LARS

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
    """Return calls of ten steps each, since ``update_each=10`` makes one step of ten longer."""
    import keras
    import tensorflow as tf

    from tfscale.bridge.feed import untuned
    from tfscale.training.optimizers import AdaHessian

    body = keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(10)])
    x = tf.random.normal([batch, *shape])
    y = tf.random.uniform([batch], 0, 10, tf.int32)
    # Without `untuned`, the end of each fit waits up to seconds for tf.data's tuning.
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
    """Return the table that users see."""
    table = new_table(title, ["contestant"], ["ms", "min ms", "times"])
    first = next(iter(times.values()))
    for name, each in times.items():
        ratio = statistics.median(a / b for a, b in zip(each, first, strict=True))
        median, least = 1e3 * statistics.median(each), 1e3 * min(each)
        table.add_row(name, f"{median:.3g}", f"{least:.3g}", f"{ratio:.2f}x")
    return table
