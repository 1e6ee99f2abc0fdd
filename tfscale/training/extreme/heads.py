"""The models that are trained: one for each repetition, or one with a head for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.support import arguments
from tfscale.training.extreme.compiling import of_one_model

_STEPS = ("train_step", "test_step", "compute_loss", "compute_metrics")


class Heads:
    """One Keras model, and the repetitions whose buckets it predicts.

    Attributes:
        name: name of its files.
        repetitions: numbers of its repetitions.
        stacked: whether outputs have an axis of repetitions.
        built: what ``build`` has returned.
        model: the model that is trained: ``built``, or a model around it whose outputs are stacked.
        epochs: how many epochs the model was trained.
    """

    def __init__(
        self, build: Callable[[int], Any], buckets: int, repetitions: Sequence[int], stacked: bool
    ) -> None:
        self.repetitions, self.stacked, self.epochs = list(repetitions), stacked, 0
        self.name = self.name_of(repetitions, stacked)
        self._shapes = _shapes(buckets, len(self.repetitions), stacked)
        self.built = _checked(build(buckets * len(self.repetitions)), self._shapes)
        self.model = self._stacked(buckets) if stacked else self.built

    def _stacked(self, buckets: int) -> Any:
        """Return a model whose outputs have an axis of repetitions."""
        built = self.built
        if not (built.built and getattr(built, "inputs", None)):
            raise ValueError(
                "shared_trunk=True needs a functional model, or a Sequential one that begins "
                f"with keras.Input; build returned {type(built).__name__} without inputs"
            )
        shape = [len(self.repetitions), buckets]
        (output,) = built.outputs
        if output.shape[1:] == tuple(shape):
            return built
        if own := [name for name in _STEPS if _overrides(type(built), name)]:
            raise ValueError(
                f"{type(built).__name__} has its own {' and '.join(own)}, and shared_trunk=True "
                "puts another model around one that ends in a row of logits. End it in "
                f"keras.layers.Reshape({shape}), and it is trained as it is"
            )
        heads = keras.layers.Reshape(shape, dtype="float32", name="heads")(output)
        return keras.Model(getattr(built, "input", built.inputs), heads)

    @staticmethod
    def name_of(repetitions: Sequence[int], stacked: bool) -> str:
        """Return the name of the model of some repetitions, and of its files."""
        return "all_repetitions" if stacked else f"repetition_{repetitions[0]:04}"

    def logits(self, x: Any) -> tf.Tensor:
        """Return logits of a batch [repetitions, samples, buckets]."""
        found = tf.cast(self.model(x, training=False), tf.float32)
        _check_outputs(found.shape, self._shapes)  # of some models it was not known before
        return tf.transpose(found, [1, 0, 2]) if self.stacked else found[None]

    def compile(self, buckets: int, multilabel: bool, given: dict[str, Any]) -> None:
        """Compile the model with an optimizer and metrics of its own.

        Args:
            buckets: number of buckets.
            multilabel: whether samples have several labels.
            given: arguments of ``MACH.compile``.
        """
        self.model.compile(**of_one_model(given, buckets, multilabel))


def _overrides(kind: type, name: str) -> bool:
    return getattr(kind, name, None) is not getattr(keras.Model, name, None)


def _shapes(buckets: int, repetitions: int, stacked: bool) -> list[tuple[int | None, ...]]:
    """Return the shapes of outputs that a model may have."""
    flat: tuple[int | None, ...] = (None, buckets * repetitions)
    return [flat, (None, repetitions, buckets)] if stacked else [flat]


def _check_outputs(found: Any, shapes: Sequence[tuple[int | None, ...]]) -> None:
    if not any(tf.TensorShape(shape).is_compatible_with(found) for shape in shapes):
        raise ValueError(
            f"build({shapes[0][1]}) returned a model with outputs of shape {tuple(found)}; "
            f"expected {' or '.join(map(str, shapes))}: end it in keras.layers.Dense(buckets)"
        )


def _checked(model: Any, shapes: Sequence[tuple[int | None, ...]]) -> Any:
    arguments.instance(
        model, "the result of build", keras.Model, "a keras.Model that ends in logits"
    )
    if model.built and hasattr(model, "output_shape"):
        _check_outputs(tuple(model.output_shape), shapes)
    last = model.layers[-1] if getattr(model, "layers", None) else None
    kind = getattr(getattr(last, "activation", None), "__name__", "linear")
    if kind in ("softmax", "sigmoid", "log_softmax") or isinstance(last, keras.layers.Softmax):
        raise ValueError(
            f"build returned a model that ends in {'Softmax' if kind == 'linear' else kind}; a "
            "MACH takes logits: leave the activation of the last layer out"
        )
    return model
