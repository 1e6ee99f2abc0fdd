"""Keras's own layers again, with weights that are rounded already, for tools that export models."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfscale.analysis.quantize import graph
from tfscale.analysis.quantize.apply import copy_weights, kernels_of, leaves, within
from tfscale.analysis.quantize.graph import config_of
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
    made: dict[int, tuple[Any, Any]] = {}  # old layers and new ones
    models: dict[int, Any] = {}  # new models within the model

    def new_layer(layer: Any) -> Any:
        if isinstance(layer, keras.Model) and graph.is_graph(layer):
            if id(layer) not in models:
                models[id(layer)] = graph.rebuilt(layer, new_layer)
            return models[id(layer)]
        if id(layer) not in made:
            config = {k: v for k, v in config_of(layer).items() if k != "quantization"}
            kind: Any = _PLAIN.get(type(layer), type(layer))
            made[id(layer)] = (layer, kind.from_config(config))
        return made[id(layer)][1]

    plain = graph.rebuilt(model, new_layer)
    for old, new in made.values():
        copy_weights(old, new)
        there = {within(new, variable): variable for variable in new.variables}
        for quantizer, kernel in kernels_of(old):
            rounded = quantizer.fake(tf.convert_to_tensor(kernel))
            there[within(old, kernel)].assign(rounded)
    return plain
