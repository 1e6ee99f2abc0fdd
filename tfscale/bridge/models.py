"""Functional models of Keras as graphs: their nodes, tensors and inputs."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.objects import mask_of, set_mask

if not KERAS_2:
    from keras.src.models.functional import Functional

Structure = Any


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


def spec_of_mask(symbol: Any) -> Any:
    """Return the symbolic mask of a symbolic tensor; None if it has none."""
    return mask_of(symbol)


def takes_mask_off(operation: Any, symbol: Any) -> bool:
    """Return whether a call of a layer takes the mask of a tensor off, for all later calls.

    Attention of Keras does so, and symbolic tensors do not show it.
    """
    is_attention = not KERAS_2 and isinstance(operation, keras.layers.MultiHeadAttention)
    return is_attention and operation.compute_dtype == symbol.dtype  # else it gets another tensor


def with_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Return a tensor that has a mask of its samples or steps, unless the mask is None."""
    if mask is not None:
        set_mask(tensor, mask)
    return tensor


def operation_of(symbol: Any) -> Any:
    """Return the layer or operation that makes a symbolic tensor."""
    return symbol._keras_history.operation


def weights_of(operation: Any) -> list[Any]:
    """Return all variables of a layer; none of an operation without weights."""
    return list(operation.variables) if isinstance(operation, keras.layers.Layer) else []


def has_own_steps(model: Any, names: Sequence[str]) -> list[str]:
    """Return which of these methods a model's class or the user has replaced."""
    return [
        name
        for name in names
        if getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model)
    ]


def loss_of(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
    """Return a model's loss, with the added losses of its layers."""
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def added_losses_of(model: Any) -> list[Any]:
    """Return the losses that layers have added in this call, and the weights' regularizers."""
    return [model._aggregate_additional_loss(loss) for loss in model.losses]


@contextlib.contextmanager
def knows_compiled_objects(model: Any) -> Iterator[None]:
    """Let Keras find a model's own losses and metrics by name, so that a copy is compiled alike.

    Keras finds only its own functions and classes, and registered ones, otherwise.
    """
    given = model._compile_config.config if model.compiled else {}
    found = [one if inspect.isroutine(one) else type(one) for one in keras.tree.flatten(given)]
    own = [one for one in found if one.__module__.split(".")[0] not in ("builtins", "keras")]
    names = {keras.saving.get_registered_name(one): one for one in own}
    with keras.saving.custom_object_scope(names):
        yield


def only_looks_up(operation: Any, weight: Any) -> bool:
    """Return whether a call of a layer uses a weight only to look up rows of it.

    The gradient of such a weight has rows.
    """
    is_table = type(operation) is keras.layers.Embedding and len(operation.variables) == 1
    return is_table and weight.regularizer is None
