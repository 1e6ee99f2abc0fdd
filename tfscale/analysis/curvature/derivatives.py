"""Derivatives of gradients in the graph that is being traced."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.analysis.curvature.tracing import TracedGraphs
from tfscale.bridge.gradients import differentiated_by

# Gradient operations that TensorFlow silently treats as constants when it differentiates them.
_SILENT = {
    "ResizeBilinearGrad": 'interpolation="bilinear" (not "nearest")',
    "FakeQuantWithMinMaxArgsGradient": "quantization-aware training",
    "FakeQuantWithMinMaxVarsGradient": "quantization-aware training",
    "FakeQuantWithMinMaxVarsPerChannelGradient": "quantization-aware training",
    "SparseAddGrad": "a sum of sparse tensors",
}

# Batch, layer and group normalization use tf.nn.moments, which treats the mean inside its variance
# as a constant. That is right for first derivatives, which are zero there, but not for second ones.
_MEAN = re.compile(r"(^|/)moments(_\d+)?/StopGradient$")

# TensorFlow raises one of these where it knows no derivative of a gradient.
UNKNOWN = (LookupError, NotImplementedError)

REMEDY = (
    "Replace the layer that this names, or that follows the variable (for LSTM and GRU: "
    "use_cudnn=False, for attention: flash_attention=False), set trainable=False on what comes "
    "before it"
)


def again(
    ys: Sequence[Any], xs: Sequence[Any], weights: Sequence[Any], constants: Sequence[Any] = ()
) -> list[Any]:
    """Return the derivatives by ``xs`` of the sum of ``weights * ys``, where ``ys`` are gradients.

    Paths through ``constants`` do not count. The result is None where no path leads
    from ``xs`` to ``ys``. Raises one of ``UNKNOWN`` if TensorFlow cannot differentiate a path.
    """
    operations = list(TracedGraphs().operations_before(list(ys)))
    for operation in operations:
        if operation.type in _SILENT:
            raise LookupError(f"{operation.name}, for {_SILENT[operation.type]}")
    with _means_that_depend(operations):
        return list(tf.gradients(list(ys), list(xs), list(weights), stop_gradients=list(constants)))


def _means_that_depend(operations: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Let the mean within ``tf.nn.moments`` depend on its input while the block runs."""
    stops = [one for one in operations if one.type == "StopGradient" and _MEAN.search(one.name)]
    return differentiated_by(stops, lambda op, dy: dy)


def first_sentence(error: Exception) -> str:
    """Return the first sentence of TensorFlow's error, which names the missing derivative."""
    return str(error.args[0] if error.args else error).split(". ")[0].strip()


def dense(gradient: Any, variable: Any) -> Any:
    """Return a gradient with all rows of its variable; rows that occur several times are summed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = variable.shape[0]
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
