"""A training step on adversarial samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import innermost
from tfscale.training.adversarial import losses
from tfscale.training.adversarial.attacks import PGD
from tfscale.training.adversarial.examples import moved


class AdversarialStep:
    """A replacement of a model's ``train_step``, which it calls with adversarial samples.

    Args:
        attack: the attack that moves samples.
        names: names of the inputs to move; None: all.
        share: a variable with the share of samples that move.
        strength: a variable with the factor of the attack's epsilon.
    """

    def __init__(
        self,
        attack: PGD,
        names: Sequence[str] | None,
        share: Any,
        strength: Any,
    ) -> None:
        self._attack = attack
        self._names = names
        self._share = share
        self._strength = strength

    def __call__(self, step: Callable[..., Any], model: keras.Model, data: Any) -> Any:
        losses.build(model, data)
        share, strength = tf.convert_to_tensor(self._share), tf.convert_to_tensor(self._strength)

        def attacked() -> Any:
            number = tf.convert_to_tensor(innermost(model.optimizer).iterations)
            given = {"number": number, "share": share, "strength": strength}
            return moved(model, data, self._attack, self._names, **given)[0]

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        # All replicas have the same share, so all take the same branch.
        x = tf.cond(tf.minimum(share, strength) > 0, attacked, lambda: x)
        return step(model, keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
