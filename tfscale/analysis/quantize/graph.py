"""The graph of a model's layers, as the model's own configuration writes it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import keras

from tfscale.bridge.models import (
    compile_alike,
    keeps_no_graph,
    knows_own_objects,
    same_lambda,
    uncompiled,
)
from tfscale.support import arguments

Tensor = tuple[str, int, int]  # name of a layer, number of its call, number of the output


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        name: name of the layer.
        number: which of the layer's calls it is, from 0.
        inputs: tensors that the call receives, in order.
    """

    name: str
    number: int
    inputs: tuple[Tensor, ...]


class Graph(NamedTuple):
    """Calls of a model's layers in an order in which they can run, and what goes in and out."""

    calls: tuple[Call, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def consumers(self) -> Counter[Tensor]:
        """Return how many calls and outputs of the model use each tensor."""
        used = Counter(one for call in self.calls for one in call.inputs)
        return used + Counter(self.outputs)


class Names(NamedTuple):
    """Keys of the dicts that a model takes and returns; empty if they are no dicts."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def is_graph(model: Any) -> bool:
    """Return whether a model is Sequential, or made of inputs and outputs."""
    return isinstance(model, keras.Sequential) or hasattr(model, "operations")


def operations(model: Any) -> dict[str, Any]:
    """Return the layers and other operations of a model by name."""
    found = model.layers if isinstance(model, keras.Sequential) else model.operations
    return {each.name: each for each in found}


def check(model: Any) -> None:
    """Raise if a model has no graph of layers."""
    arguments.instance(model, "model", keras.Model, "a Keras model")
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            f"model {model.name!r} has no weights yet: give it keras.Input, or call it once"
        )
    if isinstance(model, keras.Sequential) and keeps_no_graph(model):
        raise ValueError(
            f"model {model.name!r} has no graph, since Keras could not compute the shape of some "
            "layer's outputs: give your own layers a compute_output_shape, and make the model again"
        )
    if not is_graph(model):
        raise ValueError(
            f"model {model.name!r} is a {type(model).__name__} that defines its own call, so its "
            "graph of layers is unknown; expected a Sequential model, or one that is made of "
            "inputs and outputs: keras.Model(inputs, outputs), also of a subclass with a "
            "train_step of its own"
        )


def config_of(layer: Any) -> dict[str, Any]:
    """Return a layer's configuration for a copy in this process, with the layer's own functions.

    A file could only name them, and has no name for a lambda. But a user's own ``from_config``
    expects what a file has.
    """
    given: dict[str, Any] = layer.get_config()
    if not type(layer).from_config.__module__.startswith("keras."):
        return given
    own = {name: getattr(layer, name, None) for name in given}
    return {**given, **{name: one for name, one in own.items() if inspect.isfunction(one)}}


def graph_of(model: Any) -> Graph:
    """Read a model's graph of layers."""
    if isinstance(model, keras.Sequential):
        return _chain(model)
    config = model.get_config()
    if "output_layers" not in config:
        raise ValueError(
            f"the configuration of {model.name!r} has no graph: {type(model).__name__} has a "
            "constructor or a get_config of its own. Let its constructor take inputs, outputs and "
            "name, as keras.Model does"
        )
    calls = [
        Call(each["name"], i, tuple(_tensors(node)))
        for each in config["layers"]
        for i, node in enumerate(each["inbound_nodes"])
    ]
    inputs, outputs = (_listed(config[key]) for key in ("input_layers", "output_layers"))
    return Graph(tuple(_in_order(calls, set(inputs))), tuple(inputs), tuple(outputs))


def names_of(model: Any) -> Names:
    """Return the keys of a model's inputs and outputs, in the order of its graph."""
    config = {} if isinstance(model, keras.Sequential) else model.get_config()
    ends = (config.get(key) for key in ("input_layers", "output_layers"))
    return Names(*(tuple(each) if isinstance(each, dict) else () for each in ends))


def _alike(layer: Any) -> Any:
    return type(layer).from_config(config_of(layer))


def copied(model: Any, make: Callable[[Any], Any] = _alike) -> Any:
    """Return a model with the graph of a model and of the models in it, compiled as they are.

    Args:
        model: a model with a graph.
        make: function from a layer to a new one, which is called once for each layer; by default
            the new one is like the old one, with other values of its variables.
    """
    made: dict[int, Any] = {}

    def new_layer(layer: Any) -> Any:
        if id(layer) not in made:
            is_inner = isinstance(layer, keras.Model) and is_graph(layer)
            made[id(layer)] = rebuilt(layer, new_layer) if is_inner else make(layer)
        return made[id(layer)]

    return rebuilt(model, new_layer)


def rebuilt(model: Any, new_layer: Callable[[Any], Any], left_out: Collection[str] = ()) -> Any:
    """Return a model with the same graph and other layers, compiled as the model is.

    Args:
        model: a model with a graph.
        new_layer: function from a layer of the model to the new one.
        left_out: names of layers that leave the graph; each has one input.
    """

    lambdas: dict[int, Any] = {}

    def made_of(layer: Any) -> Any:
        if type(layer) is not keras.layers.Lambda:
            return new_layer(layer)
        if id(layer) not in lambdas:  # it may be called twice
            lambdas[id(layer)] = same_lambda(layer)
        return lambdas[id(layer)]

    if isinstance(model, keras.Sequential):
        first = model.inputs[0]
        start = keras.Input(batch_shape=first.shape, dtype=first.dtype, name=first.name)
        with knows_own_objects(model):
            layers = [made_of(layer) for layer in model.layers if layer.name not in left_out]
        try:
            made = type(model)([start, *layers], name=model.name)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"model {model.name!r} is a {type(model).__name__}, whose constructor is not that "
                "of keras.Sequential, so a copy of it cannot be made of other layers. Let its "
                "constructor take layers and name, or make a keras.Sequential of model.layers"
            ) from error
        compile_alike(made, model)
        return made

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.name in left_out:
            return args[0]
        given = {name: value for name, value in kwargs.items() if value is not None}
        return layer(*args, **given)  # the new layer may take no mask

    with knows_own_objects(model), uncompiled(model):
        made = keras.models.clone_model(model, clone_function=made_of, call_function=call)
    if type(made) is not type(model) and type(model) is not keras.Model:
        raise ValueError(
            f"model {model.name!r} is a {type(model).__name__}, whose constructor is not that of "
            "keras.Model, so a copy would lose its train_step. Let its constructor take inputs, "
            "outputs and name, or *args and **kwargs"
        )
    compile_alike(made, model)
    return made


def _chain(model: Any) -> Graph:
    names = [layer.name for layer in model.layers]
    before: list[Tensor] = [("", 0, 0), *((name, 0, 0) for name in names)]
    calls = [Call(name, 0, (last,)) for name, last in zip(names, before)]
    return Graph(tuple(calls), (before[0],), (before[-1],))


def _tensors(node: Any) -> list[Tensor]:
    """Return the tensors in the arguments of a call."""
    if isinstance(node, dict):
        if node.get("class_name") == "__keras_tensor__":
            name, index, output = node["config"]["keras_history"]
            return [(name, index, output)]
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        return [found for each in node for found in _tensors(each)]
    return []


def _listed(given: Any) -> list[Tensor]:
    """Return tensors that a configuration writes alone, in lists or in dicts."""
    if isinstance(given, dict):
        return [found for each in given.values() for found in _listed(each)]
    if len(given) == 3 and isinstance(given[0], str):
        return [(given[0], given[1], given[2])]
    return [found for each in given for found in _listed(each)]


def _in_order(calls: list[Call], ready: set[Tensor]) -> list[Call]:
    """Return calls so that each comes after those that it needs."""
    done = {(name, index) for name, index, _ in ready}
    found, waiting = [], [call for call in calls if (call.name, call.number) not in done]
    while waiting:
        now = [c for c in waiting if all((n, i) in done for n, i, _ in c.inputs)]
        if not now:
            raise ValueError(f"layers {[call.name for call in waiting]} need each other")
        found += now
        done |= {(call.name, call.number) for call in now}
        waiting = [call for call in waiting if (call.name, call.number) not in done]
    return found
