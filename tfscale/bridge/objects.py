"""Keras's models, layers, variables and optimizers, whichever Keras is installed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any, TypeGuard

import keras
import tensorflow as tf

from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.protocols import Layer, MeasuresCurvature, Model, Optimizer, Variable

_VARIABLES = (tf.Variable,) if KERAS_2 else (keras.Variable, tf.Variable)

if KERAS_2:
    Trainer = keras.Model
    # An optimizer of tensorflow-addons is of the second kind, or of the first if it is asked for.
    OPTIMIZERS: Any = (
        keras.optimizers.Optimizer,
        keras.optimizers.legacy.Optimizer,
    )

    class Saveable:
        """Keras 2 saves what TensorFlow tracks."""

    def mask_of(tensor: Any) -> Any:
        """Return the mask of the samples or steps that a layer has left; None if all are left."""
        return getattr(tensor, "_keras_mask", None)

    def set_mask(tensor: Any, mask: Any) -> None:
        """Give a tensor the mask of its samples or steps."""
        tensor._keras_mask = mask
else:
    from keras.src.backend.common import masking
    from keras.src.saving import keras_saveable
    from keras.src.trainers import trainer

    mask_of = masking.get_keras_mask
    set_mask = masking.set_keras_mask
    Trainer = trainer.Trainer
    Saveable = keras_saveable.KerasSaveable  # type: ignore[misc]
    OPTIMIZERS = (keras.optimizers.Optimizer,)

# The ends of the names of three kinds of variables that Keras makes for itself: the state of a
# layer's random numbers, the state of a recurrent layer, and an optimizer's accumulated gradients.
# Keras makes them as users make theirs, by ``keras.Variable``; only their names tell them apart.
LAYER_SEED = "seed_generator_state"
RNN_STATE = "rnn_state"
ACCUMULATOR = "gradient_accumulator"


def with_mask(tensor: Any, mask: Any) -> Any:
    """Return a tensor that has a mask of its samples or steps, unless the mask is None."""
    if mask is not None:
        set_mask(tensor, mask)
    return tensor


def copy_of(tensor: Any) -> Any:
    """Return a tensor that has the same numbers and the same mask."""
    return with_mask(tf.identity(tensor), mask_of(tensor))


def path_of(variable: Variable) -> str:
    """Return the path of a Keras variable, or the name of another one; patterns match it."""
    own = getattr(variable, "keras_path", None) or getattr(variable, "path", None)
    return str(own or variable.name.split(":")[0])


def kind_of_keras(name: str, dtype: tf.DType, trainable: bool) -> str | None:
    """Return which of these kinds a new variable is; None if it is a user's, or a weight.

    Args:
        name: name of the variable.
        dtype: its type, which keeps a user's variable of such a name from being taken for Keras's.
        trainable: whether it is made as trainable.
    """
    last = name.rsplit("/", 1)[-1]
    if trainable:
        return None
    if last in (LAYER_SEED, RNN_STATE):
        return last if dtype.is_integer == (last == LAYER_SEED) else None
    return ACCUMULATOR if ACCUMULATOR in last and dtype.is_floating else None


def is_variable(value: Any) -> bool:
    """Whether a value is a variable of Keras or of TensorFlow."""
    return isinstance(value, _VARIABLES)


def read_value(values: Any) -> Any:
    """Return a variable's value as a tensor, and other values as they are.

    TensorFlow treats a Keras variable as a tensor, but the variable's dtype is a text.
    """
    return tf.convert_to_tensor(values) if is_variable(values) else values


def native(variable: Variable) -> Any:
    """TensorFlow's own variable."""
    return variable if KERAS_2 or not isinstance(variable, keras.Variable) else variable.value


def is_made(variable: Any) -> bool:
    """Return whether Keras 3 has made the TensorFlow variable of a variable; it may do so late."""
    return variable._value is not None


def key_of(variable: Variable) -> str:
    """Return the name by which Keras's optimizers know a variable; all its copies have the same."""
    return str(native(variable)._unique_id)


def names_before(layer: Any) -> list[str]:
    """Return the names of the layers of a functional model whose outputs a layer gets."""
    (node,) = layer._inbound_nodes
    return [tensor._keras_history.operation.name for tensor in node.input_tensors]


def innermost(optimizer: Optimizer) -> Any:
    """Return the optimizer that has rate and steps, behind those that scale the loss."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def counter_of(optimizer: Optimizer) -> Any:
    """Return the variable that counts an optimizer's steps, also those that only accumulate."""
    return native(optimizer._iterations)


def measures_curvature(optimizer: Optimizer) -> TypeGuard[MeasuresCurvature]:
    """Whether an optimizer wants to be asked for more than it gets as gradients."""
    return hasattr(optimizer, "curvature")


def trained_by(optimizer: Optimizer) -> list[Any]:
    """Return the variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def index_in(optimizer: Optimizer, variable: Variable) -> int | None:
    """Return the index of a variable in its optimizer; None for Keras 2, which has no indices."""
    index = getattr(optimizer, "_get_variable_index", None)
    return None if index is None else int(index(variable))


def given_rate(optimizer: Optimizer) -> Any:
    """Return the learning rate as an optimizer holds it: a variable, a schedule or a function."""
    return optimizer._learning_rate


def momentums_of(optimizer: Any) -> list[Any]:
    """Return the momentum buffers of an optimizer; none before its first step."""
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", [])
    return [buffer for buffer in found if buffer is not None]


def loss_tracker(model: Any) -> Any:
    """Return the metric in which a model of Keras 3 keeps the mean of its loss."""
    return model._loss_tracker


def give_strategy(model: Any, strategy: Any) -> None:
    """Give a model the strategy in whose scope it is compiled, if it was made outside of one."""
    if model._distribute_strategy is None:
        model._distribute_strategy = strategy


def takes_training(model: Any) -> bool:
    """Whether a model's ``call`` takes the argument ``training``."""
    return bool(model._call_has_training_arg)


def build_on(model: Any, batch: Any) -> None:
    """Build a model, its losses and its metrics from the shapes of a batch."""
    model._symbolic_build(data_batch=batch)


def reduced_axes(layer: Layer) -> Sequence[int]:
    """Return the axes over which a layer of batch normalization computes its statistics."""
    return layer._reduction_axes


def layers_of(model: Model) -> list[Layer]:
    """Return all layers, those within others included."""
    return list(model._flatten_layers(include_self=False))


def copy_state(old: Any, new: Any) -> None:
    """Give a layer, or a model, all that files of Keras hold of another one of its kind.

    Preprocessing layers hold more than weights: vocabularies, and tensors made of statistics.
    """
    new.set_weights(old.get_weights())
    for one, other in zip([old, *layers_of(old)], [new, *layers_of(new)], strict=True):
        if type(one).load_own_variables is not keras.layers.Layer.load_own_variables:
            store: dict[str, Any] = {}
            one.save_own_variables(store)
            other.load_own_variables(store)
        if hasattr(one, "save_assets"):
            with tempfile.TemporaryDirectory() as folder:
                one.save_assets(folder)
                other.load_assets(folder)


def operations_of(model: Any) -> list[Any]:
    """Return the operations of a functional model; none if the model is of another kind."""
    return list(getattr(model, "operations", []) or [])


def with_operations(layers: Sequence[Layer]) -> list[Any]:
    """Return layers, and the operations of the functional models among them, each once."""
    found = {id(each): each for each in layers}
    for layer in layers:
        found |= {id(each): each for each in operations_of(layer)}
    return list(found.values())


def parents_of(operation: Any) -> list[Any]:
    """Return the operations whose results an operation reads, in all of its calls."""
    return [parent.operation for node in operation._inbound_nodes for parent in node.parent_nodes]


def holds_layers(layer: Layer) -> bool:
    """Whether a layer is made of others."""
    return bool(layer._layers)


def optimizers_of(model: Model) -> list[Optimizer]:
    """Return all optimizers that a model holds, in attributes or in lists of them."""
    found: dict[int, Optimizer] = {}
    for value in vars(model).values():
        values: Any = value.values() if isinstance(value, dict) else value
        for one in values if isinstance(value, (list, tuple, dict)) else [value]:
            if isinstance(one, OPTIMIZERS):
                found[id(one)] = one
    return list(found.values())


def make_anew(variable: Any) -> None:
    """Make the TensorFlow variable within a variable of Keras 3 again, in the present scope.

    Tapes watch it if they watched it before, though its layer may be frozen now: the layer may
    train later.
    """
    trainable = variable.trainable
    variable.trainable = native(variable).trainable
    try:
        variable._initialize(variable.numpy())
    finally:
        variable.trainable = trainable


def metrics_of(model: Any) -> list[Any]:
    """Return all metrics that a model of Keras 3 updates, those given to ``compile`` included.

    Before the first step Keras keeps the latter apart, because it does not know their names.
    """
    compiled = model._compile_metrics
    given = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    every = [*model.metrics, loss_tracker(model), *keras.tree.flatten(given)]
    return list({id(one): one for one in every if isinstance(one, keras.metrics.Metric)}.values())
