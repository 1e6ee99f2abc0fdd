"""The state of one quantizer inside a layer, and its arithmetic on tensors.

Rounding has the gradient of identity (straight-through, https://arxiv.org/abs/1308.3432); numbers
outside of the range have gradient 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.analysis.quantize import dyadic, numbers

_SMALLEST = 1e-20  # a learned scale stays positive


@keras.saving.register_keras_serializable(package="tfscale")
class Quantizer(keras.layers.Layer):
    r"""A scale and a zero point for each group of channels, as weights of a layer.

    With ``learned=True`` the scale is trained (LSQ). Its gradient follows from straight-through
    rounding, and is divided by :math:`\sqrt{n l}` for :math:`n` numbers with the largest integer
    :math:`l`. Numbers are rounded with a scale of 12 bits: replicas and one device sum gradients in
    different orders, and a scale that differs by 1e-8 would round some of thousands of numbers the
    other way.

    Args:
        bits: width of an integer.
        shape: shape of the numbers, of which only the channels' axes count.
        axes: axes of the channels; without them, all numbers share one scale.
        group: number of consecutive channels that share a scale.
        symmetric: whether the zero point is 0.
        learned: whether the scale is trained.

    Reference: Esser et al., Learned Step Size Quantization, https://arxiv.org/abs/1902.08153.
    """

    def __init__(
        self,
        bits: int,
        shape: Sequence[int | None] = (),
        axes: Sequence[int] = (),
        group: int = 1,
        *,
        symmetric: bool = True,
        learned: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.bits = bits
        self.axes = tuple(sorted(axis % len(shape) for axis in axes))
        self.symmetric = symmetric
        self.learned = learned
        self.limits = numbers.limits(bits, symmetric)
        self._broadcast = tuple(n if i in self.axes else 1 for i, n in enumerate(shape))
        self._channels = math.prod(int(shape[i] or 1) for i in self.axes)
        self._group = max(1, min(group, self._channels))
        self._row_of_channel = np.arange(self._channels, dtype=np.int32) // self._group

    def build(self, input_shape: Any = None) -> None:
        """Make the scale and the zero point."""
        rows = -(-self._channels // self._group)
        for name, trainable, first in (("scale", self.learned, "ones"), ("zero", False, "zeros")):
            weight = self.add_weight(
                shape=[rows], initializer=first, trainable=trainable, name=name, dtype="float32",
                autocast=False,
            )  # fmt: skip
            setattr(self, name, weight)

    def calibrate(self, values: np.ndarray, method: str) -> None:
        """Set the range from numbers of the quantizer's shape, or from any if it has no axes."""
        rows = numbers.as_rows(values, self.axes or None, self._group)
        self.set_range(numbers.range_of(rows, self.bits, self.symmetric, method))

    def set_range(self, found: numbers.Range) -> None:
        """Set the scale and the zero point."""
        self.scale.assign(np.broadcast_to(found.scale, self.scale.shape))
        self.zero.assign(np.broadcast_to(found.zero, self.zero.shape))

    def scales(self, size: int | None = None) -> Any:
        """Return the scales in the shape of the numbers, with 1 for axes that share a scale.

        Args:
            size: how many numbers there are, which scales the gradient of a learned scale.
        """
        scale = tf.maximum(tf.convert_to_tensor(self.scale), _SMALLEST)
        if self.learned:
            gain = (size / scale.shape[0] * self.limits[1]) ** -0.5 if size else 1.0
            trained = scale * gain
            # The difference is 0, and passes the gradient.
            scale = tf.stop_gradient(dyadic.coarse(scale)) + (trained - tf.stop_gradient(trained))
        return self._spread(scale)

    def zeros(self) -> Any:
        """Return the zero points in the shape of the numbers."""
        return self._spread(tf.convert_to_tensor(self.zero))

    def _bounds(self, dtype: Any) -> list[Any]:
        return [tf.cast(limit, dtype) for limit in self.limits]

    def _spread(self, rows: Any) -> Any:
        # One operation: tf.repeat has many, which took a fifth of a small net's tracing.
        return tf.reshape(tf.gather(rows, self._row_of_channel), self._broadcast)

    def integers(self, x: Any, scale: Any = None) -> Any:
        """Return the integers of numbers, without the zero point, as float32."""
        x, zero = tf.cast(x, tf.float32), self.zeros()
        scale = self.scales() if scale is None else scale
        inside = tf.clip_by_value(x / scale + zero, *self._bounds(tf.float32))
        return inside + tf.stop_gradient(tf.round(inside) - inside) - zero

    def fake(self, x: Any) -> Any:
        """Return the numbers that the integers stand for."""
        counted = x.shape if self.axes else x.shape[1:]
        scale = self.scales(math.prod(size or 1 for size in counted))
        return tf.cast(self.integers(x, scale) * scale, x.dtype)

    def from_grid(self, whole: Any, step: Any) -> Any:
        """Return the integers of whole numbers of a grid, without the zero point, in float64.

        A program of integers gets the same by a product and a shift.
        """
        factor = dyadic.dyadic_tensor(
            tf.cast(step, tf.float64) / tf.cast(self.scales(), tf.float64)
        )
        zero = tf.cast(self.zeros(), tf.float64)
        found = dyadic.round_half_up(whole * factor) + zero
        return tf.clip_by_value(found, *self._bounds(tf.float64)) - zero

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            **super().get_config(),
            "bits": self.bits,
            "shape": self._broadcast,
            "axes": self.axes,
            "group": self._group,
            "symmetric": self.symmetric,
            "learned": self.learned,
        }
