"""Tasks of ``tfscale bench convergence`` and ``rules``: data, a model, and an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfscale.tools.bench import digits, synthetic
from tfscale.tools.bench.learning import make_optimizer


@dataclasses.dataclass(frozen=True)
class Task:
    """Task of classification: the model returns logits.

    Args:
        data: function that returns training data and test data, always the same.
        model: function that returns a model that is not compiled.
        optimizer: function that returns an optimizer; the training sets its rate to ``rate``.
        rate: learning rate.
        epochs: passes over the data.
        words: description of the task.
        kinds: function that returns a sort key for each sample; sorted samples are divided among
            replicas if these are to have data of different kinds.
    """

    data: Callable[[], Any]
    model: Callable[[], Any]
    optimizer: Callable[[], Any]
    rate: float
    epochs: int
    words: str
    kinds: Callable[[Any, Any], Any] = lambda samples, answers: answers


def _digits_task(optimizer: str, rate: float, epochs: int) -> Task:
    return Task(
        digits.load,
        digits.convolution,
        lambda: make_optimizer(optimizer),
        rate,
        epochs,
        f"digits, two convolutions and two layers; {optimizer}",
    )


TASKS = {
    "digits": _digits_task("SGD", 0.02, 20),
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
    "LAMB": _digits_task("LAMB", 0.01, 10),
    "AdaHessian": _digits_task("AdaHessian", 0.03, 10),
    "perceptron": Task(
        digits.load,
        digits.perceptron,
        lambda: make_optimizer("SGD"),
        0.02,
        30,
        "digits, a perceptron; SGD",
    ),
}
