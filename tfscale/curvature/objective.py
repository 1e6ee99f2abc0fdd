"""The loss of a model on a batch, as a function of some of its variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import native


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a batch.

    Args:
        model: compiled.
        variables: of the model, of which the loss is a function.
        training: whether layers do what they do while training.
    """

    model: Any
    variables: Sequence[Any]
    training: bool

    def values(self) -> list[tf.Tensor]:
        """What the variables are."""
        return [tf.identity(native(v)) for v in self.variables]

    def loss(self, values: Sequence[tf.Tensor], batch: Any) -> tf.Tensor:
        """The mean over the batch's rows, where the variables have these values.

        No variable of the model changes.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        places = list(zip(self.variables, values, strict=True))
        with keras.StatelessScope(places, collect_losses=True, initialize_variables=False):
            told = {"training": self.training} if self.model._call_has_training_arg else {}
            y_pred = self.model(x, **told)
            return self.model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=self.training
            )
