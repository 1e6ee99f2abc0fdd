"""``tfscale bench products``: what a product with a Hessian costs.

- ``cost``: time of one product, of each of four products at once, and of a product by XLA,
  compared with the loss and its gradient over the same data. All take turns, and ratios compare
  times of the same round.
- ``memory``: peak memory of a product, compared with that of a training step with SGD, by
  TensorFlow's allocator, each in a process of its own. A second product reads its data in two
  batches of half the size.
- ``processes``: time of a product in two processes of one thread each, compared with one such
  process.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.tools.bench import machine
from tfscale.tools.bench.command import (
    answer_of_process,
    bench_parser,
    list_of,
    make_console,
    one_of,
    whole_number,
)
from tfscale.tools.bench.measure import in_turn
from tfscale.tools.bench.memory import COUNTED
from tfscale.tools.bench.table import new_table

if TYPE_CHECKING:
    from rich.table import Table

AT_ONCE = 4  # vectors of a call with several products
_ONE_THREAD = {
    "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench products``; return the exit status."""
    if argv and argv[0] in _PROCESS_KINDS:
        print(json.dumps(_PROCESS_KINDS[argv[0]](argv[1], int(argv[2]), int(argv[3]))), flush=True)
        return 0
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about = machine.describe()
    console = make_console()
    for part in arguments.parts:
        console.print(_PARTS[part](arguments.models, arguments.rounds, arguments.shrink))
    console.print(machine.signature(about, "products", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench products``."""
    parser = bench_parser("products", "Measure products with a Hessian: time, memory, processes.")
    add = parser.add_argument
    add("--parts", type=list_of(one_of(_PARTS)), default=",".join(_PARTS), metavar="NAME,...",
        help="what to measure (default: %(default)s)")  # fmt: skip
    add("--models", type=list_of(one_of(MODELS)), default=",".join(MODELS), metavar="NAME,...",
        help="models to measure (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole_number, default=10, metavar="N",
        help="turns of each call (default: %(default)s)")  # fmt: skip
    add("--shrink", type=whole_number, default=1, metavar="K",
        help="make batches K times smaller, to try the benchmark itself")  # fmt: skip
    return parser


# -------------------------------------------------------------------- models


def _resnet(keras: Any) -> tuple[Any, int]:
    layers = keras.layers

    def conv(x: Any, width: int, size: int, stride: int = 1) -> Any:
        x = layers.Conv2D(width, size, strides=stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(conv(inputs, 32, 3))
    for width, stride in ((32, 1), (64, 2), (128, 2)):
        h = conv(layers.ReLU()(conv(x, width, 3, stride)), width, 3)
        x = layers.ReLU()(h + (x if stride == 1 else conv(x, width, 1, stride)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))), 32


def _transformer(keras: Any) -> tuple[Any, int]:
    layers = keras.layers
    x = inputs = keras.Input((64, 128))
    h = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, 32)(h, h)
    h = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(128)(h)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))), 32


def _mlp(keras: Any) -> tuple[Any, int]:
    layers = keras.layers
    hidden = [layers.Dense(1024, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)]), 256


MODELS: dict[str, Callable[[Any], tuple[Any, int]]] = {
    "resnet": _resnet,
    "transformer": _transformer,
    "mlp": _mlp,
}


def _model_and_hessian(name: str, shrink: int, batches: int = 1, parts: int = 1) -> tuple[Any, Any]:
    """Return a model and its Hessian over ``batches`` batches, each read in ``parts`` parts."""
    import keras
    import numpy as np

    from tfscale.analysis import curvature

    keras.utils.set_random_seed(0)
    model, batch = MODELS[name](keras)
    model.compile(
        keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    batch //= min(shrink, batch // 2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batches * batch, *model.input_shape[1:]), np.float32)
    y = rng.integers(0, 10, len(x))
    return model, curvature.Hessian(model, x, y, batch_size=batch // parts)


# --------------------------------------------------------------------- parts


def _costs(models: Sequence[str], rounds: int, shrink: int) -> Table:
    columns = "ms", "product", "of 4 at once", "in halves", "by XLA", "gradient by XLA"
    table = new_table("a product against the loss and its gradient", ["model"], columns)
    import numpy as np

    from tfscale.analysis import curvature

    for name in models:
        model, h = _model_and_hessian(name, shrink)
        _, halves = _model_and_hessian(name, shrink, parts=2)
        x, y, _ = h.data
        by_xla = curvature.Hessian(model, x, y, batch_size=len(x), jit_compile=True)
        vectors = np.random.default_rng(1).standard_normal((AT_ONCE, h.size))
        calls = {
            "gradient": functools.partial(h.gradient_at, np.zeros(h.size)),
            "product": functools.partial(h.products, vectors[:1]),
            "several": functools.partial(h.products, vectors),
            "halves": functools.partial(halves.products, vectors[:1]),
            "xla": functools.partial(by_xla.products, vectors[:1]),
            "gradient by xla": functools.partial(by_xla.gradient_at, np.zeros(h.size)),
        }
        times = in_turn(calls, rounds, warm_up=1)
        base = times["gradient"]
        times["several"] = [each / AT_ONCE for each in times["several"]]
        ratios = [_ratio(times[call], base) for call in calls if call != "gradient"]
        table.add_row(name, f"{1e3 * statistics.median(base):.4g}", *ratios)
    return table


def _memory(models: Sequence[str], rounds: int, shrink: int) -> Table:
    columns = "step MB", "product MB", "ratio", "in halves MB", "ratio"
    table = new_table("memory of a product against a training step", ["model"], columns)
    for name in models:
        step, *products = (_in_process(kind, name, 1, shrink, COUNTED) for kind in _MEMORY_KINDS)
        ratios = [(f"{one / 1e6:.4g}", f"{one / step:.2f}x") for one in products]
        table.add_row(name, f"{step / 1e6:.4g}", *itertools.chain(*ratios))
    return table


def _peak(call: Callable[[], Any]) -> float:
    """Return the most bytes that TensorFlow allocates in a call, after a first call."""
    import tensorflow as tf

    call()
    tf.config.experimental.reset_memory_stats("CPU:0")
    held = tf.config.experimental.get_memory_info("CPU:0")["current"]
    call()
    return float(tf.config.experimental.get_memory_info("CPU:0")["peak"] - held)


def _step_memory(name: str, rounds: int, shrink: int) -> float:
    model, h = _model_and_hessian(name, shrink)
    x, y, _ = h.data
    return _peak(lambda: model.train_on_batch(x, y))


def _product_memory(name: str, rounds: int, shrink: int, parts: int = 1) -> float:
    import numpy as np

    _, h = _model_and_hessian(name, shrink, parts=parts)
    v = np.random.default_rng(1).standard_normal(h.size).astype(np.float32)
    return _peak(lambda: h @ v)


def _processes(models: Sequence[str], rounds: int, shrink: int) -> Table:
    from tfscale.tools.launch import LocalWorkers

    columns = "one: ms", "two: ms", "faster"
    table = new_table("a product in processes of one thread", ["model"], columns)
    for name in models:
        command = [sys.executable, "-m", "tfscale", "bench", "products", "--timed", name]
        ends = [str(rounds), str(shrink)]
        one = _in_process("--timed", name, rounds, shrink, _ONE_THREAD)
        with LocalWorkers([*command, *ends], 2, environment=_ONE_THREAD) as workers:
            two = max(float(output.strip().splitlines()[-1]) for output in workers.wait(1800))
        table.add_row(name, f"{1e3 * one:.4g}", f"{1e3 * two:.4g}", f"{one / two:.2f}x")
    return table


def _timed(name: str, rounds: int, shrink: int) -> float:
    """Return the median seconds of a product over four batches, on all workers together."""
    import numpy as np

    import tfscale

    with tfscale.ScaleStrategy().scope():
        _, h = _model_and_hessian(name, shrink, batches=4)
    v = np.ones(h.size)
    return statistics.median(in_turn({"product": lambda: h @ v}, rounds, warm_up=1)["product"])


def _in_process(
    kind: str, name: str, rounds: int, shrink: int, environment: dict[str, str]
) -> float:
    words = kind, name, str(rounds), str(shrink)
    return float(answer_of_process("products", words, environment))


_PARTS: dict[str, Callable[[Sequence[str], int, int], Any]] = {
    "cost": _costs,
    "memory": _memory,
    "processes": _processes,
}
_MEMORY_KINDS: dict[str, Callable[[str, int, int], float]] = {
    "--step": _step_memory,
    "--product": _product_memory,
    "--halves": functools.partial(_product_memory, parts=2),
}
_PROCESS_KINDS: dict[str, Callable[[str, int, int], float]] = {**_MEMORY_KINDS, "--timed": _timed}


def _ratio(times: Sequence[float], base: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(times, base, strict=True)):.2f}x"
