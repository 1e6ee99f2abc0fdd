"""Plans of the same size, fine-tuned: by the Hessian, by the error alone, reversed and random.

Tasks: 5,000 images of MNIST, and the next character of Python's own documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfscale.tools.bench import pruning
from tfscale.tools.bench.kept import Kept

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


def compare(options: argparse.Namespace, name: str, seed: int, kept: Kept) -> dict[str, Any]:
    """Return figures of a net and of its plans: their widths, and losses and accuracies on the
    test data before and after fine-tuning.

    Each training is kept, since a seed's trainings take minutes.
    """
    import keras

    task, mine = TASKS[name](), f"tuned {name} {seed}"

    def train() -> list[Any]:
        net = pruning.trained(task.build, *task.train, options.float_epochs, seed)
        return [v.tolist() for v in net.get_weights()]  # JSON has all digits of weights

    weights = kept.of(f"{mine} weights", train)

    @functools.cache
    def model() -> Any:
        keras.utils.clear_session()  # else names of layers would count on from other nets'
        made = task.build()
        made.set_weights([np.array(v, np.float32) for v in weights])
        return made

    @functools.cache
    def switched() -> Switched:
        return Switched(model(), plans["uniform"], task, seed, options.tuned_epochs)

    def tuned(bits: Mapping[str, int]) -> dict[str, Any]:
        return switched().tuned(bits)

    studied = kept.of(f"{mine} studied", lambda: _plans(options, model(), task, seed))
    plans = studied["plans"] | random_plans(studied["numbers"], seed, options.random)
    found = {
        "float": kept.of(f"{mine} float", lambda: _float(model(), task, seed, options.tuned_epochs))
    }
    for how, bits in plans.items():
        key = f"{mine} {' '.join(map(str, bits.values()))}"
        found[how] = kept.of(key, functools.partial(tuned, bits))
    return found


def _plans(options: argparse.Namespace, model: Any, task: Task, seed: int) -> dict[str, Any]:
    """Return the widths of the plans by studies, and how many weights each layer has."""
    from tfscale.analysis.quantize import plan, sensitivity

    _compile(model, task, 1e-3, 1)
    study, error = (
        sensitivity(
            model, *task.train, by=by, bits=WIDTHS, samples=options.samples, batch_size=250,
            progress=False, seed=seed, trained=True,
        )
        for by in ("trace", "error")
    )  # fmt: skip
    size = f"{100 * _SIZE}%"
    numbers = {layer.path: layer.numbers for layer in study.layers}
    plans = {
        "hessian": plan(study, size=size).bits,
        "error": plan(error, size=size).bits,
        "uniform": dict.fromkeys(numbers, _UNIFORM),
        "reversed": plan(reversed_study(study), size=size).bits,
    }
    return {"plans": plans, "numbers": numbers}


def random_plans(numbers: Mapping[str, int], seed: int, count: int) -> dict[str, dict[str, int]]:
    """Return random plans; more of them begin with the same ones, so a file of results serves."""
    dice = [np.random.default_rng([seed, i]) for i in range(count)]
    return {f"random {i}": random_bits(numbers, rng) for i, rng in enumerate(dice)}


class Switched:
    """Copy of a net whose widths change between trainings, so that TensorFlow traces it once.

    Args:
        model: net in float.
        bits: width of each layer that can have few bits; other plans have the same layers.
        task: data.
        seed: seed of each fine-tuning.
        epochs: number of epochs of a fine-tuning.
    """

    def __init__(
        self, model: Any, bits: Mapping[str, int], task: Task, seed: int, epochs: int
    ) -> None:
        import tensorflow as tf

        from tfscale.analysis.quantize.apply import apply, kernels_of

        self._model = apply(model, bits)
        self._begin = self._model.get_weights()
        self._task, self._seed, self._epochs = task, seed, epochs
        there = {layer.path: layer for layer in self._model.layers if hasattr(layer, "watch")}
        self._kernels = {path: kernels_of(layer) for path, layer in there.items()}
        for quantizer, _ in itertools.chain(*self._kernels.values()):
            quantizer.limits = tuple(tf.Variable(one, trainable=False) for one in quantizer.limits)
        _compile(self._model, task, 1e-3, epochs)
        self._model.optimizer.build(self._model.trainable_variables)
        self._optimizer = [variable.numpy() for variable in self._model.optimizer.variables]

    def tuned(self, bits: Mapping[str, int]) -> dict[str, Any]:
        """Return the figures of a plan, from the float net's weights on."""
        self.set(bits)
        return {"bits": list(bits.values()), **_figures(self._model, self._task, self._fit)}

    def set(self, bits: Mapping[str, int]) -> Any:
        """Return the model with the float net's weights, and the widths of a plan."""
        from tfscale.analysis.quantize import numbers

        self._model.set_weights(self._begin)
        for path, width in bits.items():
            for quantizer, kernel in self._kernels[path]:
                quantizer.bits = width
                for place, limit in zip(quantizer.limits, numbers.limits(width), strict=True):
                    place.assign(limit)
                quantizer.calibrate(np.asarray(kernel), "mse")
        return self._model

    def _fit(self) -> None:
        import keras

        for variable, value in zip(self._model.optimizer.variables, self._optimizer, strict=True):
            variable.assign(value)
        keras.utils.set_random_seed(self._seed)
        _fit(self._model, self._task, self._epochs)


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


def _float(model: Any, task: Task, seed: int, epochs: int) -> dict[str, Any]:
    """Return the figures of a copy in float that is trained further as plans are."""
    import keras

    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    _compile(copy, task, 1e-3, epochs)
    keras.utils.set_random_seed(seed)
    return _figures(copy, task, lambda: _fit(copy, task, epochs))


def _figures(model: Any, task: Task, tune: Callable[[], None]) -> dict[str, float]:
    found: dict[str, float] = {}
    for when in ("before", "after"):
        if when == "after":
            tune()
        loss, accuracy = model.evaluate(*task.test, batch_size=250, verbose=0)
        found |= {f"loss {when}": float(loss), f"accuracy {when}": float(100 * accuracy)}
    return found


def _compile(model: Any, task: Task, rate: float, epochs: int) -> None:
    import keras

    steps = epochs * -(-len(task.train[0]) // _BATCH)
    pruning.compiled(model, keras.optimizers.schedules.CosineDecay(rate, steps))


def _fit(model: Any, task: Task, epochs: int) -> None:
    model.fit(*task.train, batch_size=_BATCH, epochs=epochs, verbose=0)
