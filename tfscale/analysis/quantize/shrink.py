"""Removal of channels that are always zero."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfscale.analysis.quantize import graph
from tfscale.analysis.quantize.channels import Channels, Ends, kernel_of
from tfscale.bridge.installed import refuse_keras_2
from tfscale.bridge.objects import copy_state


def shrink(model: Any) -> Any:
    r"""Return a smaller model without the channels that are always zero.

    A channel leaves if it is zero wherever a layer reads it:

    .. math:: y_c = f(\gamma_c \, (W_c * x + b_c) + \beta_c) = 0 \quad \text{for all } x

    With it leave its filter, its bias, its batch norm, and the weights that later layers multiply
    it with. Layers that feed one residual sum lose a channel together, if it is zero in all of
    them. The smaller model gives the same answers, up to rounding. At least one channel of each
    layer stays.

    Convolutions without groups, also transposed, depthwise and separable ones, Dense, batch norm,
    pooling, sums, products, concatenations, Flatten and activations that are zero at zero are
    known; other layers keep all channels that go into them and come out.

    Args:
        model: a built model: Sequential, or made of inputs and outputs. ``quantize.Prune`` with
            ``channels=True`` makes channels zero. Shrink a model before ``quantize.apply``.

    Example:
        >>> from tfscale import quantize
        >>> plain = keras.Sequential([keras.Input([8]), keras.layers.Dense(4, "relu"),
        ...                           keras.layers.Dense(2)])
        >>> plain.compile("sgd", "mse")
        >>> prune = quantize.Prune(0.5, end=4, every=1, channels=True)
        >>> history = plain.fit(x, x[:, :2], epochs=2, callbacks=[prune], verbose=0)
        >>> quantize.shrink(plain).layers[0].units
        2

    Reference: Li et al., Pruning Filters for Efficient ConvNets,
        https://arxiv.org/abs/1608.08710.
    """
    refuse_keras_2("quantize.shrink makes layers of Keras 3")
    channels = Channels(model)
    alive = channels.alive()
    for name, ends in channels.ends.items():  # at least one channel of each layer
        numbers = channels.resolved(ends.outputs)
        if kernel_of(graph.operations(model)[name]) and not alive & set(numbers.tolist()):
            alive.add(int(numbers[0]))
    kept = {
        name: Ends(*(np.isin(channels.resolved(each), list(alive)) for each in ends))
        for name, ends in channels.ends.items()
    }
    new: dict[int, tuple[Any, Any]] = {}

    def smaller(layer: Any) -> Any:
        if id(layer) not in new:
            new[id(layer)] = (layer, _smaller(layer, kept.get(layer.name)))
        return new[id(layer)][1]

    made = graph.rebuilt(model, smaller)
    for old, layer in new.values():
        if not getattr(layer, "built", False):  # an operation such as x + y
            continue
        if old.name in kept:
            layer.set_weights([_weight(old, each, kept[old.name]) for each in old.weights])
        else:
            copy_state(old, layer)
    return made


def _smaller(layer: Any, kept: Ends | None) -> Any:
    config = graph.config_of(layer)
    if kept is not None and kernel_of(layer):
        size = "units" if isinstance(layer, keras.layers.Dense) else "filters"
        config[size] = int(kept.outputs.sum())
    return type(layer).from_config(config)


def _weight(layer: Any, variable: Any, kept: Ends) -> np.ndarray:
    """Return a weight without the numbers of channels that leave."""
    weight, name = np.asarray(variable), variable.path.rpartition("/")[2]
    kernel = kernel_of(layer)
    if kernel is not None and name == kernel.attribute:
        inputs = np.repeat(kept.inputs, getattr(layer, "depth_multiplier", 1))
        return weight.compress(inputs, kernel.inputs).compress(kept.outputs, kernel.outputs)
    if weight.ndim > 1:  # of a depthwise convolution: channels and multipliers
        return weight.compress(kept.inputs, -2)
    return weight.compress(kept.outputs, 0) if len(weight) == len(kept.outputs) else weight
