"""Models whose layers compute with the bits of a plan, to be trained further."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.analysis.quantize import folding, graph, numbers
from tfscale.analysis.quantize.dyadic import grid_step
from tfscale.analysis.quantize.grid import POOLINGS, Grid, Watch
from tfscale.analysis.quantize.layers import LAYERS, QuantizedMultiHeadAttention
from tfscale.bridge.data import batches_of
from tfscale.bridge.installed import refuse_keras_2
from tfscale.bridge.objects import copy_state, layers_of
from tfscale.support import arguments
from tfscale.support.names import guess

_LOG = logging.getLogger("tfscale")
_RANGES = (*numbers.METHODS, "learned")
_PLAN = "a plan, or a dict from layers' paths to bits, such as {'conv2d': 4, 'dense': 8}"
_SAMPLES = "give some hundreds of samples of the model's inputs, without targets"
_FLOAT = 16  # widths from here on stay in float
_MOST_BATCHES = 10_000  # of samples


def apply(
    model: Any,
    plan: Any,
    x: Any = None,
    *,
    activations: int | None = None,
    ranges: str | None = None,
    symmetric: bool = True,
    symmetric_activations: bool = False,
    group: int | str | None = None,
    fold: bool = True,
    batch_size: int = 32,
    strict: bool = False,
) -> Any:
    r"""Return a copy of a model that computes with the bits of a plan.

    Each weight :math:`w` of a layer in the plan becomes

    .. math:: Q(w) = s \, (q - z), \quad q = \mathrm{clip}(\mathrm{round}(w / s) + z, l, h)

    in each forward pass; so do the layer's inputs, if ``x`` is given. The model keeps real weights
    under the same names. Train it further with ``fit``, as any model: rounding has the gradient of
    identity, and numbers outside of the range have gradient 0. Losses, optimizer and metrics of a
    compiled model are kept, but the optimizer begins anew.

    - **Layers**: Dense, EinsumDense, Conv1D to 3D, DepthwiseConv, SeparableConv, Conv1D and 2D
      transposed, Embedding, MultiHeadAttention. A MultiHeadAttention of the path ``mha`` is in the
      plan as ``mha``, or as ``mha/query``, ``mha/key``, ``mha/value`` and
      ``mha/attention_output``. Layers
      that are not in the plan stay as they are.
    - **Batch norm** that follows a convolution or a dense layer is folded into the kernel and the
      bias, and leaves the model. Its statistics are those of the model at that time.
    - **Ranges** are chosen once, here. With ``ranges="learned"`` they begin with the smallest
      squared error, and are trained (LSQ).
    - **Files**: the model is saved as any model. To load it, import ``tfscale.quantize`` first.
    - **Replicas**: call this function in the strategy's scope.

    Args:
        model: a built model: Sequential, or made of inputs and outputs.
        plan: a plan, or a dict from paths of layers (or their names, if no two layers have the
            same) to bits, 2 or more, or to a pair of bits of weights and of activations. 16 and
            more, and None, leave a layer in float.
        x: some hundreds of samples by which the ranges of activations are chosen: arrays, or a
            dataset or generator of batches, whose targets are left out. Without it, activations
            stay in float.
        activations: bits of activations, by default the plan's, or else 8.
        ranges: ``"minmax"``, ``"percentile"`` (99.9%), ``"mse"`` or ``"learned"``; by default the
            plan's, or else ``"mse"``.
        symmetric: whether weights have the zero point 0.
        symmetric_activations: whether activations have the zero point 0.
        group: number of consecutive channels that share a scale, as in Q-BERT, by default the
            plan's, or else 1: a scale per channel. ``"kernel"`` is one scale per kernel.
        fold: whether batch norm is folded.
        batch_size: rows of a batch while ranges are chosen.
        strict: whether a layer of the plan whose kind is unknown, or which is within a layer of
            your own, is an error; else it stays in float, and a warning says so.

    Example:
        >>> from tfscale import quantize
        >>> small = quantize.apply(model, {layer.name: 4 for layer in model.layers}, x)
        >>> history = small.fit(x, y, verbose=0)
        >>> small.layers[0].name == model.layers[0].name
        True

    Reference: Jacob et al., Quantization and Training of Neural Networks for Efficient
        Integer-Arithmetic-Only Inference, https://arxiv.org/abs/1712.05877; Esser et al., Learned
        Step Size Quantization, https://arxiv.org/abs/1902.08153.
    """
    refuse_keras_2("quantize.apply makes layers of Keras 3")
    graph.check(model)
    ranges = getattr(plan, "ranges", "mse") if ranges is None else ranges
    ranges = arguments.choice(ranges, "ranges", _RANGES)
    common = {
        "symmetric": arguments.flag(symmetric, "symmetric"),
        "symmetric_activations": arguments.flag(symmetric_activations, "symmetric_activations"),
        "group": _group(getattr(plan, "group", None) if group is None else group),
        "learned": ranges == "learned",
    }
    fold = arguments.flag(fold, "fold")
    strict = arguments.flag(strict, "strict")
    batch_size = arguments.whole(batch_size, "batch_size", 1)
    arguments.optional(arguments.data, x, "x")
    arguments.optional(arguments.whole, activations, "activations", 2, 8, what="a number of bits")
    widths = _widths(plan, activations or getattr(plan, "activations", None) or 8)
    if hasattr(plan, "check"):
        plan.check(model)
    chosen = _chosen(model, widths, x is not None, strict)
    made = _Copies(model, chosen, common, folds=fold, on_grid=x is not None).copy()
    layers = [one for one in leaves(made) if hasattr(one, "watch")]
    method = "mse" if ranges == "learned" else ranges
    for layer in layers:
        for quantizer, kernel in kernels_of(layer):
            quantizer.calibrate(np.asarray(kernel), method)
    if x is not None:
        _calibrate(made, layers, x, batch_size, method)
    return made


def _group(given: Any) -> int | None:
    """Return the number of channels that share a scale, or None for all."""
    if given is None:
        return 1
    if isinstance(given, str) and given == "kernel":
        return None
    return arguments.whole(given, "group", 1, what="'kernel' or a number of channels")


def leaves(model: Any) -> Iterator[Any]:
    """Yield the layers of a model, and of the models in it."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from leaves(layer)
        else:
            yield layer


def _path(layer: Any) -> str:
    """Return the path of a layer, which is its name if it has no scope, as operations have none."""
    return str(getattr(layer, "path", None) or layer.name)


def kernels_of(layer: Any) -> list[tuple[Any, Any]]:
    """Return the quantizers of a layer's kernels, with the kernels."""
    if isinstance(layer, QuantizedMultiHeadAttention):
        return list(zip(layer.kernel_quantizers, layer.kernels(), strict=True))
    quantizers = getattr(layer, "kernel_quantizers", ())
    kernels = [getattr(layer, stage.kernel) for stage in layer.stages()] if quantizers else []
    return list(zip(quantizers, kernels, strict=True))


def _widths(plan: Any, activations: int | None) -> dict[str, tuple[int | None, int | None]]:
    """Return bits of weights and of activations for each path of a plan."""
    bits = arguments.mapping(getattr(plan, "bits", plan), "plan", _PLAN)
    if not bits:
        raise arguments.wrong(plan, "plan", _PLAN)
    return {
        arguments.text(path, "a path of plan"): _pair(path, width, activations)
        for path, width in bits.items()
    }


def _pair(path: str, width: Any, activations: int | None) -> tuple[int | None, int | None]:
    pair = width if isinstance(width, (tuple, list)) and len(width) == 2 else (width, activations)
    weights, inputs = (
        arguments.optional(arguments.whole, each, f"plan[{path!r}]", 2, 32, what="a number of bits")
        for each in pair
    )
    if weights is None or weights >= _FLOAT:
        return None, None
    return weights, None if inputs is None or inputs >= _FLOAT else inputs


def _chosen(
    model: Any, widths: Mapping[str, tuple[int | None, int | None]], inputs: bool, strict: bool
) -> dict[str, tuple[Any, int | None]]:
    """Return bits of weights and of activations for each layer that can have few bits."""
    there = {_path(layer): layer for layer in leaves(model)}
    often = Counter(layer.name for layer in there.values())
    paths = {layer.name: path for path, layer in there.items() if often[layer.name] == 1}
    attention = {
        path for path, one in there.items() if type(one) is keras.layers.MultiHeadAttention
    }
    found: dict[str, tuple[Any, int | None]] = {}
    unknown, inner = [], []
    for given, (weights, activations) in widths.items():
        path = given if given in there else paths.get(given, given)
        home, _, part = path.rpartition("/")
        home = home if home in there else paths.get(home, home)
        activations = activations if inputs else None
        if weights is None:
            continue
        if getattr(there.get(path), "lora_enabled", False):
            raise ValueError(
                f"{path!r} of {model.name!r} has LoRA weights, which quantize does not know. Add "
                "them to the kernel first: save the model's weights, and load them into a model "
                "without LoRA; or leave the layer out of the plan"
            )
        if path in attention:
            parts = dict.fromkeys(QuantizedMultiHeadAttention.PARTS, weights)
            found[path] = (parts, activations)
        elif path in there and type(there[path]) in LAYERS:
            found[path] = (weights, activations)
        elif home in attention and part in QuantizedMultiHeadAttention.PARTS:
            parts, before = found.get(home, ({}, None))
            least = [each for each in (before, activations) if each is not None]
            found[home] = ({**parts, part: weights}, min(least, default=None))
        elif path in there and hasattr(there[path], "quantization"):
            raise ValueError(
                f"{path!r} of {model.name!r} has few bits already: give quantize.apply the float "
                "model, and all layers' bits in one plan"
            )
        elif path in there and not getattr(there[path], "weights", None):
            continue  # nothing to round
        elif path in there:
            unknown.append(f"{path!r} ({type(there[path]).__name__})")
        elif (holder := _holder(path, there)) is not None:
            inner.append(f"{path!r} (in {_path(holder)!r}, a {type(holder).__name__})")
        else:
            told = guess(given, there) or f"It has {arguments.shown(list(there))}"
            raise ValueError(
                f"plan has {given!r}, and {model.name!r} has no layer of that path: the plan is "
                f"for another model. {told}"
            )
    _tell(unknown, "are of kinds that quantize does not know", strict)
    _tell(inner, "are within other layers, where quantize cannot replace them", strict)
    return found


def _holder(path: str, there: Mapping[str, Any]) -> Any:
    """Return the layer of the model's graph that has a layer of this path in it, or None."""
    for layer in there.values():
        if isinstance(layer, keras.layers.Layer) and path in map(_path, layers_of(layer)):
            return layer
    return None


def _tell(layers: list[str], why: str, strict: bool) -> None:
    if not layers:
        return
    text = f"layers {', '.join(layers)} {why}"
    if strict:
        raise ValueError(f"{text}. Leave them out of the plan, or leave out strict=True")
    _LOG.warning(
        "%s: they stay in float. quantize.plan(..., pinned={path: 32}) counts their bytes so", text
    )


class _Copies:
    """Copies of a model and of the models in it, with quantizing layers.

    Args:
        model: the model.
        chosen: bits of each layer that has few.
        common: arguments that all quantizers share.
        folds: whether batch norm is folded.
        on_grid: whether means stay on the grid.
    """

    def __init__(
        self,
        model: Any,
        chosen: Mapping[str, tuple[Any, int | None]],
        common: Mapping[str, Any],
        *,
        folds: bool,
        on_grid: bool,
    ) -> None:
        self._model, self._chosen, self._common = model, chosen, common
        self._folds, self._on_grid = folds, on_grid
        self._made: dict[int, tuple[Any, Any]] = {}  # old layers and new ones
        self._folded: dict[int, tuple[Any, Any]] = {}  # batch norms, and layers before them

    def copy(self) -> Any:
        """Return the copy of the model, with its weights."""
        made = self._copied(self._model)
        for old, new in self._made.values():
            if not (isinstance(old, keras.Model) and graph.is_graph(old)):
                copy_weights(old, new)
        for norm, before in self._folded.values():
            folding.fold(norm, self._made[id(before)][1])
        return made

    def _copied(self, model: Any) -> Any:
        layers = {layer.name: layer for layer in model.layers}
        pairs = folding.foldable(model) if self._folds else {}
        pairs = {norm: before for norm, before in pairs.items() if self._is_chosen(layers[before])}
        for norm, before in pairs.items():
            self._folded[id(layers[norm])] = (layers[norm], layers[before])
        return graph.rebuilt(model, self._layer, pairs)

    def _is_chosen(self, layer: Any) -> bool:
        return _path(layer) in self._chosen

    def _layer(self, layer: Any) -> Any:
        if id(layer) not in self._made:
            self._made[id(layer)] = (layer, self._new(layer))
        return self._made[id(layer)][1]

    def _new(self, layer: Any) -> Any:
        if isinstance(layer, keras.Model) and graph.is_graph(layer):
            return self._copied(layer)
        config = graph.config_of(layer)
        if self._is_chosen(layer):
            bits, activations = self._chosen[_path(layer)]
            how = {**self._common, "bits": bits, "activations": activations}
            is_folded = any(layer is before for _, before in self._folded.values())
            if is_folded and not layer.use_bias:
                config |= {"use_bias": True, "bias_initializer": "zeros"}
            return LAYERS[type(layer)].from_config({**config, "quantization": how})
        if self._on_grid and type(layer) in POOLINGS:
            return POOLINGS[type(layer)].from_config(config)
        return type(layer).from_config(config)


def copy_weights(old: Any, new: Any) -> None:
    """Give a new layer the weights of an old one, which has all but the quantizers'."""
    if not getattr(new, "built", False):  # an operation, or a batch norm that is folded
        return
    if type(old) is type(new):
        copy_state(old, new)
        return
    there = {within(old, variable): variable for variable in old.variables}
    for variable in new.variables:
        if (before := there.get(within(new, variable))) is not None:
            variable.assign(before)


def within(layer: Any, variable: Any) -> str:
    """Return the path of a variable within its layer."""
    return str(variable.path).removeprefix(f"{layer.path}/")


def _calibrate(model: Any, layers: list[Any], x: Any, batch_size: int, method: str) -> None:
    """Choose the ranges of activations, and the step of the grid, by some samples."""
    watches = [Watch() for _ in layers]
    for layer, watch in zip(layers, watches, strict=True):
        layer.watch = watch
    is_empty = True
    try:
        for batch in _batches(model, x, batch_size):
            model(batch, training=False)
            is_empty = False
    finally:
        for layer in layers:
            layer.watch = None
    if is_empty:
        raise ValueError(f"x has no samples to choose ranges by: {_SAMPLES}")
    for layer, watch in zip(layers, watches, strict=True):
        if not math.isfinite(watch.largest):
            raise ValueError(
                f"inputs or outputs of layer {_path(layer)!r} are NaN or infinite for these x, so "
                "they have no range: look for NaN in x, and in the weights of the model"
            )
    step = grid_step(max((watch.largest for watch in watches), default=0.0))
    for layer, watch in zip(layers, watches, strict=True):
        for i, quantizer in enumerate(getattr(layer, "input_quantizers", ())):
            quantizer.calibrate(watch.seen(i), method)
        if isinstance(getattr(layer, "grid", None), Grid):
            layer.grid.step.assign(step)


def _batches(model: Any, x: Any, batch_size: int) -> Iterator[Any]:
    """Yield batches of inputs from all that ``fit`` reads; targets are left out."""
    if isinstance(x, tf.data.Dataset) and x.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(f"x is a dataset without an end: {_SAMPLES}, such as x.take(10)")
    for number, batch in enumerate(batches_of(x, batch_size=batch_size)):
        if number == _MOST_BATCHES:
            raise ValueError(f"x has more than {_MOST_BATCHES:,} batches, or no end: {_SAMPLES}")
        inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
        given, expected = len(keras.tree.flatten(inputs)), len(model.inputs)
        if given != expected:
            raise ValueError(
                f"a batch of x has {given} arrays, and model {model.name!r} takes {expected}: "
                f"{_SAMPLES}. The second part of a pair counts as targets: yield ((a, b),)"
            )
        yield inputs
