"""``tfscale bench memory``: how much memory a training step takes, with and without Recompute.

Each training runs in a process of its own, whose first step has one sample: it traces and
warms up. The memory of the next steps is the process's highest resident size beyond that
(Linux's VmHWM, reset in between). Weights, the batch and TensorFlow itself are there before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfscale.bench import machine
from tfscale.bench.command import list_of, make_console, one_of, whole_number

STEPS = 3


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
# The shares of the plain step's memory that each is asked to keep.
FRACTIONS = {"mlp": 0.27, "conv": 0.4, "transformer": 0.32}


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    if argv and argv[0] == "--training":
        _train(json.loads(argv[1]))
        return 0
    arguments = make_parser().parse_args(argv)
    about = machine.describe()
    console = make_console()
    for name, replicas in itertools.product(arguments.models, arguments.replicas):
        fractions = (None, *(arguments.fractions or (FRACTIONS[name],)))
        plain = None
        for fraction in fractions:
            asked = {"model": name, "fraction": fraction, "replicas": replicas}
            found = measure({**asked, "scale": arguments.scale})
            plain = plain or found
            console.print(_line(asked, found, plain))
    console.print(machine.signature(about, "memory", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfscale bench memory",
        description="Measure the memory of training steps, with and without Recompute.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--models", type=list_of(one_of(MODELS)), default=",".join(MODELS), metavar="NAME,...",
        help="(default: %(default)s)")  # fmt: skip
    add("--fractions", type=list_of(_share), metavar="F,...",
        help="budgets, as shares of the plain step's memory "
        f"(default: {', '.join(f'{k} {v}' for k, v in FRACTIONS.items())})")  # fmt: skip
    add("--replicas", type=list_of(whole_number), default="1,2", metavar="K,...",
        help="replicas on logical CPUs of one process, each with a whole batch "
        "(default: %(default)s)")  # fmt: skip
    add("--scale", type=_share, default=1.0, metavar="S",
        help="a smaller batch: this share of it (default: %(default)s)")  # fmt: skip
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return value


def measure(asked: dict[str, Any], timeout: float = 1800) -> dict[str, Any]:
    """Train in a process of its own.

    Args:
        asked: model, fraction (None: without Recompute), replicas, and scale of the batch.
        timeout: seconds.
    """
    command = [sys.executable, "-m", "tfscale", "bench", "memory", "--training", json.dumps(asked)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"the training ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def _line(asked: dict[str, Any], found: dict[str, Any], plain: dict[str, Any]) -> str:
    fraction, replicas = asked["fraction"], asked["replicas"]
    peak, predicted = found["peak"], found["predicted"]
    on = "1 replica" if replicas == 1 else f"{replicas} replicas"
    how = "plain" if fraction is None else f"fraction {fraction:g}"
    line = f"{asked['model']:>12}, {on:>10}, {how:>13}: "
    line += f"{peak / 1e6:7.0f} MB ({peak / plain['peak']:4.0%}), step {found['step']:6.2f} s "
    line += f"({found['step'] / plain['step']:.2f}x), loss {found['loss']:.9g}"
    if predicted:
        off = predicted / peak - 1
        line += f"; predicted {predicted / 1e6:.0f} MB ({off:+.0%}), {found['overhead']:.0%} again"
    return line


# ---------------------------------------------------------- the training's process


def _train(asked: dict[str, Any]) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    replicas = asked["replicas"]
    strategy = _strategy(tf, replicas)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, size = MODELS[asked["model"]](keras)
        model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)
    size = max(replicas, int(size * asked["scale"])) * replicas
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, *model.input_shape[1:]), np.float32)
    y = rng.standard_normal((size, 1), np.float32)
    first = tf.data.Dataset.from_tensors((x[:replicas], y[:replicas]))
    data = first.concatenate(tf.data.Dataset.from_tensors((x, y)).repeat(STEPS))
    meter = _meter(keras)
    plan = _train_with(model, data, asked["fraction"], (x, y), meter)
    print(
        json.dumps(
            {
                "peak": meter.peak,
                "step": min(meter.times[1:]),
                "loss": meter.loss,
                "predicted": plan and plan.peak * replicas,
                "overhead": plan and plan.overhead,
            }
        )
    )


def _strategy(tf: Any, replicas: int) -> Any:
    if replicas == 1:
        return tf.distribute.get_strategy()
    machine.split_cpu(replicas)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def _train_with(model: Any, data: Any, fraction: float | None, example: Any, meter: Any) -> Any:
    from tfscale.callbacks import Recompute

    callbacks = [meter]
    if fraction is not None:
        recompute = Recompute(fraction=fraction, example=example, verbose=0)
        callbacks.insert(0, recompute)
    model.fit(data, verbose=0, callbacks=callbacks)
    return None if fraction is None else recompute.plan


def _meter(keras: Any) -> Any:
    class Meter(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.peak, self.loss, self.base = 0, 0.0, 0
            self.times: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times.append(time.perf_counter() - self.began)
            self.loss = float(logs["loss"])
            if batch == 0:
                self.base = _settle()
            self.peak = _highest() - self.base

    return Meter()


def _settle() -> int:
    """Gives free memory back, forgets the highest resident size; returns the resident size."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _highest()


def _highest() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM: this benchmark needs Linux")
