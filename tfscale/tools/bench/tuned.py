"""Plans of the same size, fine-tuned: by the Hessian, by the error alone, reversed and random.

Tasks: 5,000 images of MNIST, and the next character of Python's own documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfscale.tools.bench import pruning

WIDTHS = (2, 3, 4, 6, 8)
_SIZE = 0.125  # of float32: half of the bytes of 8 bits
_UNIFORM = 4
_BATCH = 64
_LENGTH, _ROWS, _TEST_ROWS = 48, 3000, 750  # of sequences of characters


class Task(NamedTuple):
    """A net and its data.

    Attributes:
        build: function that makes the net.
        train: inputs and targets.
        test: inputs and targets.
    """

    build: Callable[[], Any]
    train: tuple[Any, Any]
    test: tuple[Any, Any]


def images() -> Task:
    """Return the task of handwritten digits."""
    train, test = pruning.mnist()
    return Task(pruning.blocks, train, test)


def characters() -> Task:
    """Return the task of the next character in Python's documentation, which Python contains."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    known = sorted({*text} & {chr(code) for code in range(32, 127)} | {"\n"})
    place = {letter: i for i, letter in enumerate(known)}
    numbers = np.array([place[letter] for letter in text if letter in place], np.int32)
    rows = _ROWS + _TEST_ROWS
    cut = numbers[: rows * _LENGTH + 1]
    x, y = cut[:-1].reshape(rows, _LENGTH), cut[1:].reshape(rows, _LENGTH)
    order = np.random.default_rng(0).permutation(rows)
    train, test = order[:_ROWS], order[_ROWS:]
    return Task(lambda: _reader(len(known)), (x[train], y[train]), (x[test], y[test]))


def _reader(letters: int) -> Any:
    import keras

    layers = keras.layers
    first = keras.Input([_LENGTH], dtype="int32")
    x = layers.Embedding(letters, 24)(first)
    for width in (48, 48, 32):
        x = layers.Conv1D(width, 4, padding="causal", activation="relu")(x)
    return keras.Model(first, layers.Dense(letters)(layers.Dense(48, "relu")(x)))


TASKS: dict[str, Callable[[], Task]] = {"images": images, "characters": characters}


def compare(options: argparse.Namespace, task: Task, seed: int) -> dict[str, Any]:
    """Return the test accuracies, in percent, of a net and of its plans after fine-tuning."""
    from tfscale.analysis.quantize import plan, sensitivity

    model = _trained(task, seed, options.tuned_epochs)
    study, error = (
        sensitivity(
            model, *task.train, by=by, bits=WIDTHS, samples=options.samples, batch_size=250,
            progress=False, seed=seed,
        )
        for by in ("trace", "error")
    )  # fmt: skip
    size = f"{100 * _SIZE}%"
    plans = {
        "hessian": plan(study, size=size).bits,
        "error": plan(error, size=size).bits,
        "uniform": dict.fromkeys((layer.path for layer in study.layers), _UNIFORM),
        "reversed": plan(reversed_study(study), size=size).bits,
    }
    numbers = {layer.path: layer.numbers for layer in study.layers}
    plans |= {
        f"random {i}": random_bits(numbers, np.random.default_rng([seed, i]))
        for i in range(options.random)
    }
    found = {"float": _tuned(model, None, task, seed, options.tuned_epochs)}
    known: dict[tuple[int, ...], float] = {}
    for name, bits in plans.items():
        key = tuple(bits.values())
        if key not in known:
            known[key] = _tuned(model, bits, task, seed, options.tuned_epochs)
        found[name] = known[key]
    return found


def reversed_study(study: Any) -> Any:
    """Return a study in which the most sensitive weights seem the least sensitive ones."""
    order = sorted(study.layers, key=lambda one: one.curvature.value)
    swapped = {one.path: other for one, other in zip(order, reversed(order), strict=True)}
    layers = []
    for one in study.layers:
        other = swapped[one.path].curvature
        costs = {
            b: dataclasses.replace(other, value=other.value * e) for b, e in one.errors.items()
        }
        layers.append(dataclasses.replace(one, curvature=other, costs=costs))
    return dataclasses.replace(study, layers=tuple(layers))


def random_bits(numbers: Mapping[str, int], rng: np.random.Generator) -> dict[str, int]:
    """Return random widths that take as many bytes as 4 bits for all: at most, and nearly."""
    limit = _UNIFORM * sum(numbers.values())
    while True:
        widths = rng.choice(WIDTHS, len(numbers)).tolist()
        used = sum(n * b for n, b in zip(numbers.values(), widths, strict=True))
        if 0.95 * limit <= used <= limit:
            return dict(zip(numbers, widths, strict=True))


def _trained(task: Task, seed: int, epochs: int) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    model = task.build()
    _fit(model, task, 3e-3, 2 * epochs)
    return model


def _tuned(model: Any, bits: dict[str, int] | None, task: Task, seed: int, epochs: int) -> float:
    """Return the accuracy of a copy that is trained further, with few bits or in float."""
    import keras

    from tfscale.analysis.quantize import apply

    keras.utils.set_random_seed(seed)
    if bits is None:
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
    else:
        copy = apply(model, bits)
    _fit(copy, task, 1e-3, epochs)
    return float(100 * copy.evaluate(*task.test, batch_size=250, verbose=0)[1])


def _fit(model: Any, task: Task, rate: float, epochs: int) -> None:
    import keras

    steps = epochs * -(-len(task.train[0]) // _BATCH)
    pruning.compiled(model, keras.optimizers.schedules.CosineDecay(rate, steps))
    model.fit(*task.train, batch_size=_BATCH, epochs=epochs, verbose=0)
