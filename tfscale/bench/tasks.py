"""What models learn in ``tfscale bench convergence`` and ``rules``: data, a model, an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfscale.bench import digits, synthetic
from tfscale.bench.learning import make_optimizer


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to learn: the model gives the logits of one of several answers.

    Args:
        data: makes what it learns from and what it is tested with, always the same.
        model: makes one that is not compiled.
        optimizer: makes one; its rate is ``rate``.
        rate: of learning.
        epochs: how often it sees the data.
        words: what it is, for people.
        kinds: of samples and answers: numbers by which they are sorted, where replicas are to have
            data of different kinds.
    """

    data: Callable[[], Any]
    model: Callable[[], Any]
    optimizer: Callable[[], Any]
    rate: float
    epochs: int
    words: str
    kinds: Callable[[Any, Any], Any] = lambda samples, answers: answers


def _of_digits(optimizer: str, rate: float, epochs: int) -> Task:
    return Task(
        digits.load,
        digits.convolution,
        lambda: make_optimizer(optimizer),
        rate,
        epochs,
        f"digits, two convolutions and two layers; {optimizer}",
    )


TASKS = {
    "digits": _of_digits("SGD", 0.02, 20),
    "embedding": Task(
        synthetic.documents,
        synthetic.embedding,
        lambda: make_optimizer("Adam"),
        0.01,
        4,
        "subjects of made-up documents, a table of 2,000 words and two layers; Adam",
    ),
    "language": Task(
        synthetic.sentences,
        synthetic.transformer,
        lambda: make_optimizer("Adam"),
        0.005,
        8,
        "a made-up language, a transformer of one block; Adam",
        lambda sentences, _: synthetic.beginnings(sentences),
    ),
    "LAMB": _of_digits("LAMB", 0.01, 10),
    "AdaHessian": _of_digits("AdaHessian", 0.03, 10),
    "perceptron": Task(
        digits.load,
        digits.perceptron,
        lambda: make_optimizer("SGD"),
        0.02,
        30,
        "digits, a perceptron; SGD",
    ),
}
