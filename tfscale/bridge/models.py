"""Functional models of Keras as graphs: their nodes, tensors and inputs."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfscale.bridge.hooks import is_assigned
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.objects import innermost, layers_of, optimizers_of

if not KERAS_2:
    from keras.src.models.functional import Functional

Structure = Any
_NOT_OWN = ("builtins", "keras", "tensorflow")  # modules whose objects Keras finds, or never names

_ROWS = 1_299_709  # a prime number


class Graph:
    """The calls of layers and operations of which a functional model is made.

    A graph does not keep its model alive, so that a mapping may have models as weak keys and
    graphs as values.

    Attributes:
        nodes: the calls, in an order in which each comes after those that it needs.
        inputs: symbolic inputs of the model.
        outputs: symbolic outputs of the model.
    """

    def __init__(self, model: Any, functional: Any) -> None:
        self._model, self._of_calls = weakref.ref(model), weakref.ref(functional)
        self.inputs, self.outputs = list(functional.inputs), list(functional.outputs)
        by_depth = functional._nodes_by_depth
        every = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
        self.nodes = [node for node in every if node.operation and not node.is_input]

    @property
    def model(self) -> Any:
        """The model, which must be alive."""
        return _alive(self._model)

    @property
    def _functional(self) -> Any:
        return _alive(self._of_calls)

    def standardized(self, x: Structure) -> list[Any]:
        """Return the model's inputs as a list in the order of ``inputs``."""
        return list(self._functional._standardize_inputs(x))

    def packed(self, outputs: Sequence[Any]) -> Structure:
        """Return outputs in the structure that the model returns."""
        struct = self._functional._outputs_struct
        packed = keras.tree.pack_sequence_as(struct, list(outputs))
        return packed[0] if isinstance(packed, (list, tuple)) and len(packed) == 1 else packed

    def begin_with_rows(self, symbols: Sequence[Any]) -> list[bool]:
        """Return whether the first axis of each of these symbolic tensors is that of the batch.

        Layers and operations of a user may move it, as ``ops.reshape(x, (-1, 4))`` does. So they
        compute shapes for a number of rows that no other axis has.
        """
        if not symbols or all(map(_keeps_rows, self.nodes)):
            return [True] * len(symbols)
        given = [
            keras.KerasTensor((x.shape[0] or _ROWS, *x.shape[1:]), x.dtype, sparse=x.sparse)
            for x in self.inputs
        ]
        found = keras.Function(self.inputs, list(symbols)).compute_output_spec(given)
        rows = given[0].shape[0]
        return [tuple(x.shape[:1]) == (rows,) for x in found]

    def run(
        self, nodes: Sequence[Any], known: dict[int, Any], training: bool | None
    ) -> dict[int, Any]:
        """Call the layers and operations of some nodes, and return the tensors that they make.

        Args:
            nodes: nodes, in order.
            known: for the id of each symbolic tensor that the nodes need, its tensor.
            training: the argument ``training`` of layers.
        """
        found = dict(known)
        with _one_call(self.model, training):
            for node in nodes:
                args, kwargs = node.arguments.fill_in(found)
                context = getattr(node.operation, "_call_context_args", {})
                if training is not None and "training" in context:
                    kwargs["training"] = training
                outputs = node.operation(*args, **kwargs)
                for symbol, tensor in zip(node.outputs, keras.tree.flatten(outputs), strict=True):
                    found[id(symbol)] = tensor
        return found


def _keeps_rows(node: Any) -> bool:
    """Return whether a node calls a layer of Keras, which leaves the batch's axis in its place."""
    is_stock = type(node.operation).__module__.startswith("keras.src.layers.")
    return is_stock and not isinstance(node.operation, keras.layers.Lambda)


def _alive(reference: weakref.ref[Any]) -> Any:
    model = reference()
    assert model is not None, "a graph is used after its model has been deleted"
    return model


def graph_of(model: Any) -> Graph | None:
    """Return the graph of a functional or sequential model; None for other models.

    A model with a ``call`` of its own is none of these, and neither is one that is not built.
    """
    if KERAS_2:
        return None
    is_sequential = isinstance(model, keras.Sequential)
    if is_sequential and type(model).call is not keras.Sequential.call:
        return None
    functional = model._functional if is_sequential else model
    if not isinstance(functional, Functional) or type(functional).call is not Functional.call:
        return None
    return Graph(model, functional)


@contextlib.contextmanager
def _one_call(model: Any, training: bool | None) -> Iterator[None]:
    """Make the calls of layers in this block parts of one call of the model.

    The call begins without added losses, and layers ask it whether it trains.
    """
    context = model._get_call_context()
    context.set_value("training", training)
    try:
        yield
    finally:
        model._maybe_reset_call_context()


def keeps_no_graph(model: Any) -> bool:
    """Return whether Keras could make no graph of a built Sequential model."""
    return model.built and model._functional is None


def takes_mask_off(operation: Any, symbol: Any) -> bool:
    """Return whether a call of a layer takes the mask of a tensor off, for all later calls.

    Attention of Keras does so, and symbolic tensors do not show it.
    """
    is_attention = not KERAS_2 and isinstance(operation, keras.layers.MultiHeadAttention)
    return is_attention and operation.compute_dtype == symbol.dtype  # else it gets another tensor


def weights_of(operation: Any) -> list[Any]:
    """Return all variables of a layer; none of an operation without weights."""
    return list(operation.variables) if isinstance(operation, keras.layers.Layer) else []


def overrides(owner: Any, name: str, base: type = keras.Model) -> bool:
    """Return whether the user has replaced a method of Keras's base class.

    The user may replace it by a class, or on the model or optimizer itself.
    """
    of_class = getattr(type(owner), name) is not getattr(base, name)
    return of_class or is_assigned(owner, name)


def may_change_gradients(model: Any) -> bool:
    """Return whether an optimizer's own method gets the gradients before ``apply`` does."""
    return not KERAS_2 and any(
        overrides(optimizer, "apply_gradients", keras.optimizers.Optimizer)
        for optimizer in optimizers_of(model)
    )


def added_losses_of(model: Any) -> list[Any]:
    """Return the losses that layers have added in this call, and the weights' regularizers."""
    return [model._aggregate_additional_loss(loss) for loss in model.losses]


@contextlib.contextmanager
def knows_own_objects(model: Any, functions: dict[str, Any] | None = None) -> Iterator[None]:
    """Let Keras find by name what a model's layers, losses and metrics are made of, for a copy.

    Keras finds only its own functions and classes, and registered ones, otherwise.

    Args:
        model: the model.
        functions: functions of the user, by the names that they get for the copy.
    """
    compiled = keras.tree.flatten(model._compile_config.config) if model.compiled else []
    given = [*compiled, *layers_of(model), *map(innermost, optimizers_of(model))]
    given += [
        one
        for each in given
        if hasattr(each, "__dict__")
        for one in vars(each).values()
        if callable(one)
    ]
    found = [one if inspect.isroutine(one) else type(one) for one in given]
    own = [one for one in found if _package_of(one) not in _NOT_OWN]
    names = {keras.saving.get_registered_name(one): one for one in own}
    with keras.saving.custom_object_scope({**names, **(functions or {})}):
        yield


def _package_of(one: Any) -> str:
    return str(getattr(one, "__module__", None) or "builtins").split(".")[0]


@contextlib.contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Let Keras copy a model as if it was not compiled."""
    compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = compiled


def compile_alike(made: Any, model: Any) -> None:
    """Compile a copy as a model is, with the user's own functions.

    A configuration has no name for a lambda, and one name for all closures of a function.
    """
    if not model.compiled:
        return
    functions: dict[str, Any] = {}

    def named(one: Any) -> Any:
        if not inspect.isfunction(one):
            return keras.saving.serialize_keras_object(one)
        name = f"function_{len(functions)}"
        functions[name] = one
        kind = {"module": "builtins", "class_name": "function", "registered_name": name}
        return {**kind, "config": name}

    config = model.get_compile_config()
    own = model._compile_config.config
    for key in ("loss", "metrics", "weighted_metrics"):
        if any(inspect.isfunction(one) for one in keras.tree.flatten(own.get(key))):
            config[key] = keras.tree.map_structure(named, own[key])
    with knows_own_objects(model, functions):  # a scope within a scope would hide the outer one
        made.compile_from_config(config)


def same_lambda(layer: Any) -> Any:
    """Return a layer with the functions of a Lambda, which no configuration holds."""
    how = {"mask": layer.mask, "arguments": layer.arguments, "dtype": layer.dtype_policy}
    shape = layer._output_shape
    return keras.layers.Lambda(layer.function, output_shape=shape, name=layer.name, **how)


def only_looks_up(operation: Any, weight: Any) -> bool:
    """Return whether a call of a layer uses a weight only to look up rows of it.

    The gradient of such a weight has rows.
    """
    is_table = type(operation) is keras.layers.Embedding and len(operation.variables) == 1
    return is_table and weight.regularizer is None
