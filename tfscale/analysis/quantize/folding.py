r"""Folding of batch norm into the layer before it.

With moving mean :math:`\mu` and variance :math:`\sigma^2`, batch norm after a linear layer is the
linear layer with

.. math:: W' = W \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}}, \quad
    b' = \beta + (b - \mu) \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}}
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfscale.analysis.quantize.graph import graph_of
from tfscale.analysis.quantize.layers import LAYERS

_LINEAR = set(LAYERS) - {
    keras.layers.Embedding, keras.layers.MultiHeadAttention, keras.layers.EinsumDense,
}  # fmt: skip


def foldable(model: Any) -> dict[str, str]:
    """Return the batch norms of a model that can be folded, and the layers before them, by name.

    The layer before is linear, nothing else uses its outputs, and each of both is called once.
    """
    graph = graph_of(model)
    layers = {layer.name: layer for layer in model.layers}
    used = graph.consumers()
    often = {call.name for call in graph.calls if call.number > 0}
    found = {}
    for call in graph.calls:
        if type(layers.get(call.name)) is not keras.layers.BatchNormalization:
            continue
        before = call.inputs[0][0]
        once = used[call.inputs[0]] == 1 and not {call.name, before} & often
        if once and _is_linear(layers.get(before), layers[call.name]):
            found[call.name] = before
    return found


def _is_linear(layer: Any, norm: Any) -> bool:
    if type(layer) not in LAYERS or type(layer) not in _LINEAR:
        return False
    last = getattr(layer, "data_format", "channels_last") == "channels_last"
    axis = norm.axis[0] if isinstance(norm.axis, (list, tuple)) else norm.axis
    rank = len(layer.output.shape)
    is_over_channels = axis % rank == (rank - 1 if last else 1)
    return is_over_channels and layer.activation is keras.activations.linear


def factors(norm: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what a batch norm multiplies each channel with, and then adds, while it infers."""
    variance, mean = np.asarray(norm.moving_variance), np.asarray(norm.moving_mean)
    factor = 1 / np.sqrt(variance.astype(np.float64) + norm.epsilon)
    if norm.scale:
        factor = factor * np.asarray(norm.gamma)
    return factor, (np.asarray(norm.beta) if norm.center else 0.0) - mean * factor


def fold(norm: Any, layer: Any) -> None:
    """Change the kernel and the bias of a layer as a batch norm after it would change outputs."""
    factor, added = factors(norm)
    stage = layer.stages()[-1]
    kernel = getattr(layer, stage.kernel)
    axes = [axis % len(kernel.shape) for axis in stage.axes]
    shape = [size if axis in axes else 1 for axis, size in enumerate(kernel.shape)]
    kernel.assign(np.asarray(kernel) * factor.reshape(shape))
    layer.bias.assign(np.asarray(layer.bias) * factor + added)
