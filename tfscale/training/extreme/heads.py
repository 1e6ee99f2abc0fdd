"""The models that are trained: one for each repetition, or one with a head for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.support import arguments
from tfscale.training.extreme.losses import MultiHot


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
        width = buckets * len(self.repetitions)
        self.model = self.built = built = _checked(build(width), width)
        if self.stacked:
            if not (built.built and getattr(built, "inputs", None)):
                raise ValueError(
                    "shared_trunk=True needs a functional model, or a Sequential one that begins "
                    f"with keras.Input; build returned {type(built).__name__} without inputs"
                )
            shape = [len(self.repetitions), buckets]
            heads = keras.layers.Reshape(shape, dtype="float32", name="heads")(built.output)
            self.model = keras.Model(built.inputs, heads)

    @staticmethod
    def name_of(repetitions: Sequence[int], stacked: bool) -> str:
        """Return the name of the model of some repetitions, and of its files."""
        return "all_repetitions" if stacked else f"repetition_{repetitions[0]:04}"

    def logits(self, x: Any) -> tf.Tensor:
        """Return logits of a batch [repetitions, samples, buckets]."""
        found = tf.cast(self.model(x, training=False), tf.float32)
        return tf.transpose(found, [1, 0, 2]) if self.stacked else found[None]

    def compile(self, buckets: int, multilabel: bool, given: dict[str, Any]) -> None:
        """Compile the model with an optimizer and metrics of its own.

        Args:
            buckets: number of buckets.
            multilabel: whether samples have several labels.
            given: arguments of ``MACH.compile``.
        """
        given = dict(given)
        loss = given.pop("loss", None)
        if multilabel:
            loss = keras.losses.get(loss) or keras.losses.BinaryCrossentropy(from_logits=True)
            loss = MultiHot(_as_object(loss), buckets)
        elif loss is None:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = {
            name: keras.tree.map_structure(_copied, given.pop(name, None))
            for name in ("metrics", "weighted_metrics")
        }
        self.model.compile(_copied(given.pop("optimizer")), loss, **metrics, **given)


def _checked(model: Any, width: int) -> Any:
    arguments.instance(
        model, "the result of build", keras.Model, "a keras.Model that ends in logits"
    )
    shape = tuple(model.output_shape) if model.built and hasattr(model, "output_shape") else None
    if shape not in (None, (None, width)):
        raise ValueError(
            f"build({width}) returned a model with outputs of shape {shape}; expected "
            f"(None, {width}): end it in keras.layers.Dense(buckets)"
        )
    last = model.layers[-1] if getattr(model, "layers", None) else None
    kind = getattr(getattr(last, "activation", None), "__name__", "linear")
    if kind in ("softmax", "sigmoid", "log_softmax") or isinstance(last, keras.layers.Softmax):
        raise ValueError(
            f"build returned a model that ends in {'Softmax' if kind == 'linear' else kind}; a "
            "MACH takes logits: leave the activation of the last layer out"
        )
    return model


def _copied(given: Any) -> Any:
    """Return a new object like an optimizer or a metric, since models cannot share one."""
    if isinstance(given, (keras.optimizers.Optimizer, keras.metrics.Metric)):
        return type(given).from_config(given.get_config())
    return given


def _as_object(loss: Any) -> Any:
    if isinstance(loss, keras.losses.Loss):
        return loss

    class Given(keras.losses.Loss):
        """A user's function as a loss."""

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return loss(y_true, y_pred)

    return Given(name=getattr(loss, "__name__", "loss"))
