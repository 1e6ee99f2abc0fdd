"""The grid on which whole numbers travel between layers, and pooling that stays on it.

A mean of numbers on the grid is not on it. So layers that take means round while they infer.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.analysis.quantize import dyadic

registered = keras.saving.register_keras_serializable(package="tfscale")


@registered
class Grid(keras.layers.Layer):
    """The step of a model's grid, as a weight of each layer that rounds to it."""

    def build(self, input_shape: Any = None) -> None:
        """Make the weight."""
        self.step = self.add_weight(
            shape=[], initializer="ones", trainable=False, name="step", dtype="float32",
            autocast=False,
        )  # fmt: skip

    def enter(self, x: Any) -> Any:
        """Return numbers as whole numbers of the grid, in float64."""
        return dyadic.on_grid(x, tf.convert_to_tensor(self.step))

    def leave(self, whole: Any, dtype: Any) -> Any:
        """Return the real numbers that whole numbers of the grid stand for."""
        return dyadic.off_grid(whole, tf.convert_to_tensor(self.step), dtype)


class Watch:
    """Values that a layer sees while it is calibrated.

    Attributes:
        inputs: values before each of the layer's kernels, as a list per kernel.
        largest: largest magnitude of all inputs and outputs.
    """

    SAMPLE = 1 << 16  # values kept of each batch

    def __init__(self) -> None:
        self.inputs: dict[int, list[np.ndarray]] = {}
        self.largest = 0.0

    def note(self, values: Any, stage: int | None = None) -> None:
        """Keep some of the values, with the smallest and the largest."""
        flat = np.asarray(values, np.float32).ravel()
        # Python's max() would drop a NaN.
        self.largest = float(np.maximum(self.largest, np.abs(flat).max(initial=0)))
        if stage is not None:
            some = flat[:: max(1, flat.size // self.SAMPLE)]
            ends = [flat.min(initial=0), flat.max(initial=0)]
            self.inputs.setdefault(stage, []).append(np.concatenate([some, ends]))

    def seen(self, stage: int) -> np.ndarray:
        """Return the values kept of one kernel's inputs."""
        return np.concatenate(self.inputs[stage])


def rounds_to_grid(layer: Any, training: Any) -> bool:
    """Return whether a call of a layer computes with whole numbers."""
    return not training and layer.compute_dtype == "float32"


class Pooling:
    """A pooling layer of Keras whose means are on the grid."""

    watch: Watch | None = None

    def build(self: Any, input_shape: Any) -> None:
        """Make the step of the grid."""
        super().build(input_shape)  # type: ignore[misc]
        self.grid = Grid(name="grid")
        self.grid.build(None)

    def call(self: Any, inputs: Any, training: Any = None) -> Any:
        """Take means, and round them to the grid while the model infers."""
        return self.pooled(inputs, training)

    def pooled(self: Any, inputs: Any, training: Any, **masks: Any) -> Any:
        """Return the means of inputs, with the masks that Keras's layer takes."""
        if self.watch is not None or not rounds_to_grid(self, training):
            return super().call(inputs, **masks)  # type: ignore[misc]
        means = self.means(self.grid.enter(inputs), **masks)
        # Sums are whole, so no mean but a half is as near to the next number as this.
        nearly_half = 0.25 / self.summed(inputs, means)
        return self.grid.leave(dyadic.round_half_up(means + nearly_half), inputs.dtype)

    def means(self: Any, whole: Any, **masks: Any) -> Any:
        """Return means of whole numbers in float64."""
        return super().call(whole, **masks)  # type: ignore[misc]

    def summed(self: Any, inputs: Any, means: Any) -> Any:
        """Return how many numbers a mean has at most."""
        if hasattr(self, "pool_size"):
            return float(np.prod(self.pool_size))
        return tf.cast(tf.size(inputs) // tf.maximum(tf.size(means), 1), tf.float64)


class MaskedPooling(Pooling):
    """A pooling layer that leaves out masked steps: Keras passes masks to calls that name them."""

    def call(  # type: ignore[override]
        self: Any, inputs: Any, mask: Any = None, training: Any = None
    ) -> Any:
        """Take means of the steps that a mask has left."""
        return self.pooled(inputs, training, mask=mask)


class Pooling3D(Pooling):
    """Means over places of three dimensions, which TensorFlow has no float64 kernel for."""

    def means(self: Any, whole: Any, **masks: Any) -> Any:
        """Return means over the last two dimensions, and of these over the first one."""
        if self.data_format == "channels_first":
            return super().means(whole, **masks)
        pool = functools.partial(tf.nn.avg_pool2d, padding=self.padding.upper())
        size, strides = self.pool_size, self.strides
        rows = tf.shape(whole)
        flat = tf.reshape(whole, tf.concat([[rows[0] * rows[1]], rows[2:]], 0))
        flat = pool(flat, ksize=size[1:], strides=strides[1:])
        inner = tf.shape(flat)
        flat = tf.reshape(flat, [rows[0], rows[1], inner[1] * inner[2], rows[4]])
        flat = pool(flat, ksize=[size[0], 1], strides=[strides[0], 1])
        found = tf.reshape(flat, [rows[0], tf.shape(flat)[1], inner[1], inner[2], rows[4]])
        shape = self.compute_output_shape(whole.shape)
        return tf.ensure_shape(found, shape)


_KINDS = {"GlobalAveragePooling1D": MaskedPooling, "AveragePooling3D": Pooling3D}
POOLINGS: dict[type, Any] = {}
for _name in (
    "AveragePooling1D", "AveragePooling2D", "AveragePooling3D",
    "GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D",
):  # fmt: skip
    _base = getattr(keras.layers, _name)
    _made = registered(
        type(
            f"Grid{_name}",
            (_KINDS.get(_name, Pooling), _base),
            {
                "__doc__": f"Keras's {_name}, whose means are on the grid while the model infers.",
                "__module__": __name__,
            },
        )
    )
    POOLINGS[_base] = globals()[_made.__name__] = _made
