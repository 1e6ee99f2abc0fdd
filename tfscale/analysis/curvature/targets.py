"""Targets that are drawn from a model's predictions.

The random numbers of a row come from a hash of its inputs and a seed. So a row draws the same
target in each pass, in any batch, on any replica.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfscale.analysis.curvature.objective import Draw

_UNKNOWN = (
    'curvature.Fisher(kind="sampled") draws targets from predictions, but cannot for '
    'the loss {loss}. It supports cross-entropies and the mean squared error: use kind="empirical"'
)
_SETTING = (
    'curvature.Fisher(kind="sampled") cannot draw targets for a {loss} with {name}={given!r}, only '
    'with {name}={default!r}: use kind="empirical"'
)
# Settings of losses whose default behaviour is supported.
_DEFAULTS = {"label_smoothing": 0.0, "ignore_class": None, "axis": -1}
_FUNCTIONS = {
    "SparseCategoricalCrossentropy": keras.losses.sparse_categorical_crossentropy,
    "CategoricalCrossentropy": keras.losses.categorical_crossentropy,
    "BinaryCrossentropy": keras.losses.binary_crossentropy,
    "MeanSquaredError": keras.losses.mean_squared_error,
}


def drawn(data: Any, seed: int) -> Draw:
    """Return a function that draws targets for the rows of a batch."""
    rows = _hashes(keras.utils.unpack_x_y_sample_weight(data)[0])

    def draw(loss: Any, y_pred: tf.Tensor, place: int) -> tf.Tensor:
        y_pred = tf.convert_to_tensor(y_pred, loss.dtype)
        kind = _kind(loss)
        if kind in ("SparseCategoricalCrossentropy", "CategoricalCrossentropy"):
            return _classes(loss, y_pred, rows, (seed, place), kind.startswith("Sparse"))
        if kind == "BinaryCrossentropy":
            shares = tf.sigmoid(y_pred) if _are_logits(loss) else y_pred
            return tf.cast(_uniform(rows, y_pred, (seed, place)) < shares, y_pred.dtype)
        # The loss is the mean over the last axis: over d numbers, with variances d / 2.
        deviation = tf.sqrt(tf.cast(tf.shape(y_pred)[-1], y_pred.dtype) / 2)
        return y_pred + deviation * _normal(rows, y_pred, (seed, place))

    return lambda *given: tf.stop_gradient(draw(*given))


def _kind(loss: Any) -> str:
    """Return the name of the known loss that this is, by its class or by the function that it
    calls.
    """
    names = [kind.__name__ for kind in type(loss).__mro__]
    function = getattr(loss, "fn", None)
    for name, known in _FUNCTIONS.items():
        if name in names or function is known:
            _refuse_settings(name, loss.get_config())
            return name
    raise ValueError(_UNKNOWN.format(loss=getattr(function, "__name__", names[0])))


def _refuse_settings(loss: str, settings: dict[str, Any]) -> None:
    for name, default in _DEFAULTS.items():
        given = settings.get(name, default)
        if given != default:
            raise ValueError(_SETTING.format(loss=loss, name=name, default=default, given=given))


def _are_logits(loss: Any) -> bool:
    return bool(loss.get_config().get("from_logits", False))


def _classes(loss: Any, y_pred: tf.Tensor, rows: Any, key: Any, sparse: bool) -> tf.Tensor:
    shares = tf.nn.softmax(y_pred) if _are_logits(loss) else y_pred
    shares /= tf.reduce_sum(shares, -1, keepdims=True)
    below = tf.cumsum(shares, axis=-1, exclusive=True)[..., 1:]
    found = tf.reduce_sum(tf.cast(_uniform(rows, y_pred[..., :1], key) > below, tf.int32), -1)
    return found if sparse else tf.one_hot(found, tf.shape(y_pred)[-1], dtype=y_pred.dtype)


def _normal(rows: tf.Tensor, like: tf.Tensor, key: tuple[int, int]) -> tf.Tensor:
    """Return normally distributed numbers, by the Box-Muller transform."""
    radius = tf.sqrt(-2 * tf.math.log(_uniform(rows, like, (*key, 1))))
    return radius * tf.cos(2 * math.pi * _uniform(rows, like, (*key, 2)))


def _uniform(rows: tf.Tensor, like: tf.Tensor, key: tuple[int, ...]) -> tf.Tensor:
    """Return numbers above 0 and below 1, in the shape of ``like`` (first axis: rows)."""
    each = tf.size(like, tf.int64) // tf.size(rows, tf.int64)
    inner = tf.range(each)
    names = [
        tf.broadcast_to(rows[:, tf.newaxis], [tf.size(rows), tf.cast(each, tf.int32)]),
        tf.broadcast_to(inner, [tf.size(rows), tf.cast(each, tf.int32)]),
        *(tf.fill([tf.size(rows), tf.cast(each, tf.int32)], tf.constant(k, tf.int64)) for k in key),
    ]
    hashed = tf.fingerprint(tf.reshape(tf.stack(names, -1), [-1, len(names)]))
    bits = tf.bitcast(tf.reshape(hashed, [-1, 2, 4]), tf.uint32)[:, 0]
    return tf.reshape((tf.cast(bits, like.dtype) + 0.5) / 2.0**32, tf.shape(like))


def _hashes(x: Any) -> tf.Tensor:
    """Return one number for each row of all inputs."""
    each = [tf.bitcast(tf.fingerprint(one), tf.int64) for one in tf.nest.flatten(x)]
    return each[0] if len(each) == 1 else tf.bitcast(tf.fingerprint(tf.stack(each, -1)), tf.int64)
