"""A first layer for hundreds of thousands of sparse inputs."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfscale.support import arguments
from tfscale.training.extreme.hashing import buckets_of, keys_of


@keras.saving.register_keras_serializable("tfscale")
class HashedFeatures(keras.layers.Layer):
    """A dense layer for sparse rows, whose kernel has a row for each bucket of hashed columns.

    The input is a sparse batch [samples, features], such as scipy's or a ``tf.SparseTensor``, for
    ``keras.Input([features], sparse=True)``. Column j is added with the sign s(j) to the bucket
    h(j), so the sum is unbiased (Weinberger et al., 2009). A gradient has only the rows that occur.

    Args:
        units: size of the output.
        buckets: rows of the kernel, by which the input's columns are hashed.
        seed: seed of the hash functions.
    """

    def __init__(self, units: int, buckets: int, *, seed: int = 0, **how: Any) -> None:
        super().__init__(**how)
        self.units = arguments.whole(units, "units", 1, example="128")
        self.buckets = arguments.whole(buckets, "buckets", 2, 1 << 24, example="16_384")
        self.seed = arguments.whole(seed, "seed", 0)

    def build(self, shape: Any) -> None:
        """Make the kernel, and the table of hashed columns."""
        keys = keys_of(int(shape[-1]))
        self._rows = buckets_of(keys, self.buckets, self.seed, 0)
        self._signs = 1.0 - 2.0 * buckets_of(keys, 2, self.seed, 1)
        self.kernel = self.add_weight(shape=[self.buckets, self.units], name="kernel")
        self.bias = self.add_weight(shape=[self.units], initializer="zeros", name="bias")

    def call(self, x: Any) -> Any:
        """Return the output of a batch."""
        if not isinstance(x, tf.SparseTensor):
            if keras.backend.is_keras_tensor(x):
                return self.compute_output_spec(x)
            x = tf.sparse.from_dense(x)
        columns = x.indices[:, 1]
        rows = tf.gather(tf.constant(self._rows), columns)
        signs = tf.cast(tf.gather(tf.constant(self._signs), columns), self.compute_dtype)
        parts = tf.gather(tf.convert_to_tensor(self.kernel), rows)
        parts *= (tf.cast(x.values, self.compute_dtype) * signs)[:, None]
        samples = tf.shape(x, out_type=tf.int64)[0]
        return tf.math.unsorted_segment_sum(parts, x.indices[:, 0], samples) + self.bias

    def compute_output_spec(self, x: Any) -> Any:
        """Return the shape of the output."""
        return keras.KerasTensor([x.shape[0], self.units], dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        own = {"units": self.units, "buckets": self.buckets, "seed": self.seed}
        return {**super().get_config(), **own}
