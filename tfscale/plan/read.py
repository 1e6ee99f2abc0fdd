"""Reading of a Keras model into units, by tracing each of its layers once.

Floating-point operations, and the bytes that the backward pass needs, are counted in TensorFlow's
own graph of a layer and its gradient. So a layer that nobody knows is counted like any other.
Layers that are equal, on inputs of equal shapes, are traced once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.plan.units import Unit
from tfscale.support import arguments

if TYPE_CHECKING:
    from tfscale.plan.graph_cost import Counted


def read(model: Any, example: Any = None) -> list[Unit]:
    """Read a built Keras model into units, one for each call of a layer.

    Sequential and functional models inside the model are read layer by layer; any other layer is
    one unit, however many layers it holds.

    Args:
        model: a Keras model.
        example: one sample of the inputs with a batch axis, if the model does not know its shapes.

    Example:
        >>> units = tfscale.plan.read(model)
        >>> units[0].kind, units[0].parameters, units[0].flops
        ('dense', 72, 144.0)
    """
    return units_of(model, calls_of(model, example))


def can_be_staged(model: Any) -> bool:
    """Return whether a model's layers can be cut into stages: it is Sequential or functional."""
    from tfscale.bridge.models import graph_of

    return graph_of(model) is not None


def units_of(model: Any, calls: Sequence[Call]) -> list[Unit]:
    """Return a unit for each call of a layer of a model."""
    known: dict[str, Unit] = {}
    units: dict[str, Unit] = {}
    for call in calls:
        name = call.layer.name
        unit = known.get(call.key) or known.setdefault(call.key, _unit(call))
        if name in units:  # the second call of a layer reads the weights of the first one
            again = sum(other.startswith(f"{name}#") for other in units) + 2
            unit, name = dataclasses.replace(unit, parameters=0), f"{name}#{again}"
        units[name] = dataclasses.replace(unit, name=name, cuts=_cuts(model, call.layer))
    return list(units.values())


@dataclasses.dataclass(frozen=True)
class Call:
    """A layer and the shapes on which the model calls it."""

    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @functools.cached_property
    def key(self) -> str:
        """A text that equal calls of equal layers share."""
        try:
            config = {k: v for k, v in self.layer.get_config().items() if k != "name"}
            told = json.dumps(config, sort_keys=True, default=repr)
        except NotImplementedError:  # a layer that cannot be saved equals no other
            told = str(id(self.layer))
        return f"{type(self.layer)} {told} {self.args} {sorted(self.kwargs.items())}"


def example_specs(model: Any, example: Any) -> Any:
    """Return the specs of a model's inputs for one sample."""
    import keras
    import tensorflow as tf

    if example is not None:
        arrays = tf.nest.map_structure(tf.convert_to_tensor, example)
        return tf.nest.map_structure(lambda x: tf.TensorSpec([1, *x.shape[1:]], x.dtype), arrays)
    made = getattr(model, "inputs", None) or _inputs_as_built(model)
    shapes = [one.shape for one in made]
    if not shapes or any(size is None for shape in shapes for size in shape[1:]):
        has = f"inputs of shape {shapes}" if shapes else "no shapes of inputs"
        raise ValueError(
            f"model {model.name!r} has {has}; expected all sizes but the batch's. Pass example=, "
            "a batch of its inputs, or call the model on one first"
        )
    specs = [
        tf.TensorSpec([1, *shape[1:]], keras.backend.standardize_dtype(one.dtype))
        for shape, one in zip(shapes, made)
    ]
    structure = getattr(model, "input", specs[0])
    return tf.nest.pack_sequence_as(structure, specs)


def _inputs_as_built(model: Any) -> list[Any]:
    """Return the input of a subclassed model that was called on one; Keras keeps its shape only."""
    import keras

    shape = (model.get_build_config() or {}).get("input_shape")
    is_one = isinstance(shape, (tuple, list)) and all(isinstance(n, int) for n in shape[1:])
    return [keras.KerasTensor(shape, keras.config.floatx())] if is_one else []


def _leaves(model: Any) -> Iterator[Any]:
    import keras

    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _leaves(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            yield layer


def calls_of(model: Any, example: Any = None) -> list[Call]:
    """Return the calls of a model's layers, in order; raise if it is no model, or calls none."""
    import keras
    import tensorflow as tf

    arguments.instance(model, "model", keras.Model, "a Keras model")
    arguments.optional(arguments.data, example, "example")
    inputs = example_specs(model, example)
    found: list[Call] = []
    with contextlib.ExitStack() as stack:
        for layer in {id(one): one for one in _leaves(model)}.values():
            stack.enter_context(_noting(layer, found))

        def run(x: Any) -> Any:
            found.clear()  # TensorFlow traces again if the model makes its weights
            return model(x, training=True)

        tf.function(run).get_concrete_function(inputs)
    if not found:
        raise arguments.wrong(model, "model", "a Keras model that calls one layer or more")
    return found


@contextlib.contextmanager
def _noting(layer: Any, found: list[Call]) -> Iterator[None]:
    """Note each call of a layer, while its ``call`` is shadowed on the instance."""
    import tensorflow as tf

    plain = layer.call

    def call(*args: Any, **kwargs: Any) -> Any:
        def as_spec(x: Any) -> Any:
            return tf.TensorSpec(x.shape, x.dtype) if isinstance(x, tf.Tensor) else x

        found.append(Call(layer, *tf.nest.map_structure(as_spec, (args, kwargs))))
        return plain(*args, **kwargs)

    layer.call = call
    try:
        yield
    finally:
        del layer.call


def _unit(call: Call) -> Unit:
    from tfscale.plan.graph_cost import count

    counted = count(call.layer, call.args, call.kwargs)
    kind, pairs = _kind(call.layer)
    return Unit(
        call.layer.name,
        kind,
        parameters=sum(weight.shape.num_elements() for weight in _weights(call.layer)),
        inputs=counted.inputs,
        outputs=counted.outputs,
        flops=counted.flops,
        backward_flops=counted.backward_flops,
        kept=counted.kept,
        pairs=pairs,
        halo=_halo(call.layer, counted) if kind == "conv" else None,
    )


def _weights(layer: Any) -> list[Any]:
    return [weight.value for weight in layer.trainable_weights]


def _kind(layer: Any) -> tuple[str, int]:
    """Return the kind of a layer, and how many sums over ranks a pair takes."""
    from keras import layers

    from tfscale.bridge import objects
    from tfscale.bridge.layers import ATTENTIONS

    if isinstance(layer, (layers.Dense, layers.EinsumDense)):
        return "dense", 1
    if isinstance(layer, (layers.Conv1D, layers.Conv2D, layers.Conv3D)):
        return "conv", 1
    if isinstance(layer, layers.Embedding):
        return "embedding", 1
    if isinstance(layer, (layers.LayerNormalization, layers.RMSNormalization)):
        return "norm", 1
    if isinstance(layer, ATTENTIONS):
        return "pair", 1
    inside = objects.layers_of(layer)
    dense = sum(isinstance(one, layers.Dense) for one in inside)
    pairs = sum(isinstance(one, ATTENTIONS) for one in inside) + dense // 2
    if pairs:  # a block of a transformer: its sums over ranks are those of its parts
        return "pair", pairs
    return ("other", 1) if layer.weights else ("plain", 1)


def _cuts(model: Any, layer: Any) -> tuple[tuple[str, str], ...]:
    """Return patterns of the paths of a layer's parts, and how ranks may cut each part.

    ``ScaleStrategy(tensor={...})`` takes them, with "columns" or "rows" instead of "either". Dense
    layers within a block are taken to be pairs: the first one in columns, the second one in rows.
    """
    from keras import layers

    from tfscale.bridge import objects
    from tfscale.bridge.layers import ATTENTIONS

    dense = (layers.Dense, layers.EinsumDense)
    if isinstance(layer, dense):
        return ((_pattern(model, layer), "either"),)
    if isinstance(layer, layers.Embedding):
        return ((_pattern(model, layer), "vocabulary"),)
    if isinstance(layer, ATTENTIONS):
        return ((_pattern(model, layer), "heads"),)
    inside = objects.layers_of(layer)
    heads = [one for one in inside if isinstance(one, ATTENTIONS)]
    of_heads = {id(part) for one in heads for part in objects.layers_of(one)}
    loose = [one for one in inside if isinstance(one, dense) and id(one) not in of_heads]
    found = [(_pattern(model, one), "heads") for one in heads]
    kinds = itertools.cycle(("columns", "rows"))
    pairs = loose if len(loose) % 2 == 0 else []
    return (*found, *((_pattern(model, one), next(kinds)) for one in pairs))


def _pattern(model: Any, layer: Any) -> str:
    """Return a pattern of the paths of a layer's weights, in any model that is made alike.

    Keras gives each new model without a name another one, and some begin paths with it.
    """
    path = layer.path or layer.name
    rest = path.removeprefix(f"{model.name}/")
    return f"^{re.escape(rest)}/" if rest == path else f"^[^/]+/{re.escape(rest)}/"


def _halo(layer: Any, counted: Counted) -> tuple[float, float] | None:
    """Return the rows that a convolution of stride 1 needs of a neighbour, in bytes."""
    stride, dilation = layer.strides[0], layer.dilation_rate[0]
    if stride != 1 or dilation != 1 or layer.padding != "same" or not counted.input_height:
        return None
    rows = layer.kernel_size[0] // 2
    height = counted.input_height
    return rows * counted.inputs / height, rows * counted.outputs / height
