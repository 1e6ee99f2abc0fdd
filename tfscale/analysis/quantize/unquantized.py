"""Keras's own layers again, with weights that are rounded already, for tools that export models."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.analysis.quantize import graph
from tfscale.analysis.quantize.apply import copy_weights, kernels_of, leaves, within
from tfscale.analysis.quantize.grid import POOLINGS
from tfscale.analysis.quantize.layers import LAYERS

_PLAIN: dict[type, Any] = {
    made: plain for known in (LAYERS, POOLINGS) for plain, made in known.items()
}


def widths_of(model: Any) -> dict[str, int]:
    """Return the bits of kernels of a model that ``quantize.apply`` made, by their paths."""
    return {
        str(kernel.path): quantizer.bits
        for layer in leaves(model)
        for quantizer, kernel in kernels_of(layer)
    }


def unquantized(model: Any) -> Any:
    """Return a model of Keras's own layers whose kernels have the numbers that ``model`` rounds to.

    Activations are not rounded in it.
    """
    made: list[tuple[Any, Any]] = []  # old layers and new ones

    def new_layer(layer: Any) -> Any:
        config = {k: v for k, v in graph.config_of(layer).items() if k != "quantization"}
        kind: Any = _PLAIN.get(type(layer), type(layer))
        made.append((layer, kind.from_config(config)))
        return made[-1][1]

    plain = graph.copied(model, new_layer)
    for old, new in made:
        copy_weights(old, new)
        there = {within(new, variable): variable for variable in new.variables}
        for quantizer, kernel in kernels_of(old):
            rounded = quantizer.fake(tf.convert_to_tensor(kernel))
            there[within(old, kernel)].assign(rounded)
    return plain
