"""Adversarial examples from arrays, to test a model's robustness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.support import arguments
from tfscale.training.adversarial import draws, losses
from tfscale.training.adversarial.attacks import PGD, checked_attack
from tfscale.training.adversarial.inputs import Inputs, checked_names


def examples(
    model: keras.Model,
    x: Any,
    y: Any,
    attack: PGD,
    *,
    sample_weight: Any = None,
    batch_size: int = 256,
    inputs: Sequence[str] | None = None,
) -> Any:
    """Return the samples, moved so that the model's compiled loss rises.

    Args:
        model: a model that is compiled with a loss. It does not change.
        x: an array, or a structure of arrays, as for ``model.evaluate``.
        y: the true targets.
        attack: ``FGSM`` or ``PGD``.
        sample_weight: as for ``model.evaluate``; samples of weight 0 stay where they are.
        batch_size: number of samples that are attacked at once.
        inputs: names of the inputs to move; all by default.

    Returns:
        Arrays in the structure of ``x``.

    Example:
        >>> attack = tfscale.adversarial.FGSM(0.1, low=0.0, high=1.0)
        >>> wrong = tfscale.adversarial.examples(model, x, y, attack)
        >>> loss = model.evaluate(wrong, y, verbose=0)
    """
    arguments.instance(model, "model", keras.Model, "a keras.Model")
    arrays = {"x": x, "y": y, "sample_weight": sample_weight}
    for name, given in arrays.items():
        if name != "sample_weight" or given is not None:
            _check_rows(given, name, x)
    checked_attack(attack)
    names = checked_names(inputs)
    batch_size = arguments.whole(batch_size, "batch_size", 1, what="a number of samples")
    losses.check(model)
    data = (x, y) if sample_weight is None else (x, y, sample_weight)
    move = _move(model, attack, names)
    parts = [move(batch) for batch in tf.data.Dataset.from_tensor_slices(data).batch(batch_size)]
    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *parts)


def _check_rows(given: Any, name: str, x: Any) -> None:
    counts = [np.shape(each)[:1] for each in keras.tree.flatten(arguments.data(given, name))]
    expected = np.shape(keras.tree.flatten(x)[0])[:1]
    if not expected or set(counts) != {expected}:
        what = "an array with as many rows as x, or a structure of such arrays"
        raise arguments.wrong(given, name, what)


def _move(model: keras.Model, attack: PGD, names: Sequence[str] | None) -> Any:
    @tf.function(reduce_retracing=True, autograph=False)
    def traced(batch: Any) -> Any:
        return moved(model, batch, attack, names)[0]

    def move(batch: Any) -> Any:
        losses.build(model, batch)
        return keras.tree.map_structure(np.asarray, traced(batch))

    return move


def moved(
    model: keras.Model,
    data: Any,
    attack: PGD,
    names: Sequence[str] | None,
    *,
    number: Any = 0,
    share: Any = None,
    strength: Any = 1.0,
) -> tuple[Any, Any, Any]:
    """Return the parts of a batch, as ``train_step`` unpacks it, with moved inputs.

    Args:
        model: a compiled and built model.
        data: a batch.
        attack: the attack that moves samples.
        names: names of the inputs to move; None: all.
        number: a number that changes the draws, such as the step's.
        share: share of samples that move, from 0 to 1; None: all do.
        strength: factor of the attack's epsilon.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    inputs = Inputs(x, names)
    keys = draws.row_keys(inputs.moved, number)
    found = attack.perturb(
        inputs.moved,
        losses.input_gradients(model, inputs, y, sample_weight),
        lambda: [draws.spread(keys, like) for like in inputs.moved],
        strength,
    )
    if share is not None:
        chosen = draws.uniform(keys) < share
        found = [_where(chosen, new, old) for new, old in zip(found, inputs.moved, strict=True)]
    return inputs.with_moved([tf.stop_gradient(one) for one in found]), y, sample_weight


def _where(chosen: Any, new: Any, old: Any) -> Any:
    return tf.where(tf.reshape(chosen, [-1] + [1] * (old.shape.rank - 1)), new, old)
