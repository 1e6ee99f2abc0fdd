"""Parts of the gallery's programs: data of a few rows, and a training that reports itself."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

# Full batches, and a last one of one row, of which all replicas but one get nothing.
BATCH, STEPS = 8, 4
ROWS = (STEPS - 1) * BATCH + 1
EPOCHS = 2


@dataclass(frozen=True)
class Program:
    """A program as its users write it.

    Args:
        build: makes and compiles the model.
        train: trains it, and returns what its user sees, by name.
        own_losses: what its user tells the strategy of them.
        noise: a pattern of the variables that are nothing but rounding.
        equal: False where the mathematics differs; then it must run, and all replicas agree.
        why: they are so.
    """

    build: Callable[[], keras.Model]
    train: Callable[[keras.Model], dict[str, Any]]
    own_losses: str | None = None
    noise: str = ""
    equal: bool = True
    why: str = ""

    def may(self, name: str) -> float:
        """Return by how much a variable or a number may be off."""
        if not self.equal:
            return math.inf
        return 1e-2 if self.noise and re.search(self.noise, name) else 1e-6


# An attention's key has a bias that changes no probability: its gradient is nothing but rounding,
# and Adam divides that by its own size.
KEYS = {"noise": "key.bias", "why": "the gradient of an attention's key's bias is rounding"}


def random(*shape: int, seed: int = 0, low: float = -1, high: float = 1) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype("float32")


def integers(below: int, *shape: int, seed: int = 0, low: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, below, shape).astype("int32")


def images(side: int = 8, channels: int = 1, rows: int = ROWS) -> np.ndarray:
    return random(rows, side, side, channels, seed=rows, low=0)


def classes(count: int, rows: int = ROWS) -> np.ndarray:
    return integers(count, rows, seed=count)


def fit(x: Callable[[], Any], y: Callable[[], Any] | None = None, **settings: Any) -> Any:
    """A ``fit`` of these data, with validation, evaluate and predict after it where they work."""

    def train(model: keras.Model) -> dict[str, Any]:
        how = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **settings}
        targets = () if y is None else (y(),)
        return dict(model.fit(x(), *targets, **how).history)

    return train


def fit_and_judge(x: Callable[[], Any], y: Callable[[], Any], **settings: Any) -> Any:
    """Fit, evaluate and predict."""

    def train(model: keras.Model) -> dict[str, Any]:
        seen = fit(x, y, validation_data=(x(), y()), **settings)(model)
        judged = model.evaluate(x(), y(), batch_size=BATCH, verbose=0, return_dict=True)
        seen |= {f"evaluated {name}": value for name, value in judged.items()}
        predicted = keras.tree.flatten(model.predict(x(), batch_size=BATCH, verbose=0))
        return seen | {f"predicted {i}": one for i, one in enumerate(predicted)}

    return train
