"""Reader of a Keras model: what its training needs, found without training and without slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import innermost, path_of
from tfscale.bridge.optimizers import is_elementwise
from tfscale.parallel.planned import Array, Needs, Weight
from tfscale.support import arguments
from tfscale.training.recompute import trace
from tfscale.training.recompute.simulate import memory
from tfscale.training.recompute.traced_step import TracedStep

_SHOWN = 3  # largest number of names in a note


def needs_of(
    model: keras.Model,
    batch: int,
    optimizer: Any = "adam",
    input_shape: Sequence[int] | None = None,
    example: Any = None,
) -> Needs:
    """Return what a training of a model needs; see ``memory.of_training``.

    Args:
        model: the model.
        batch: number of samples of one replica.
        optimizer: optimizer of a model that is not compiled.
        input_shape: shape of one sample.
        example: a batch ``(x, y)``.
    """
    arguments.instance(model, "model", keras.Model, "a keras.Model")
    notes = []
    if not model.compiled:
        inputs = _inputs(model, batch, input_shape, example)
        model, specs = _Compiled(model, optimizer), (inputs,)
        notes.append(
            f"The model is not compiled: {type(innermost(model.optimizer)).__name__} and a loss of "
            "the outputs alone are assumed."
        )
    else:
        specs = _batch(model, batch, input_shape, example)
    step = _traced(model, specs)
    if step.unknown:
        notes.append(f"Operations of unknown size count as nothing: {_some(step.unknown)}.")
    inner = innermost(model.optimizer)
    trained = {id(v) for v in model.trainable_variables}
    return Needs(
        weights=tuple(_weight(inner, v) for v in model.trainable_variables),
        others=tuple(_array(v) for v in model.variables if id(v) not in trained),
        activations=max(memory(step)),
        even=is_elementwise(inner),
        optimizer=type(inner).__name__,
        batch=batch,
        notes=tuple(notes),
    )


class _Compiled(keras.Model):
    """A model that is not compiled, with an optimizer, and with the mean of outputs as a loss."""

    def __init__(self, model: keras.Model, optimizer: Any) -> None:
        super().__init__(name="compiled")
        self.inner = model
        self.compile(optimizer, jit_compile=False)

    def call(self, inputs: Any, training: Any = None) -> Any:
        return self.inner(inputs, training=training)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        outputs = [tf.cast(each, tf.float32) for each in tf.nest.flatten(y_pred)]
        return tf.add_n([tf.reduce_mean(tf.square(each)) for each in outputs])


# ------------------------------------------------------------------ shapes of a batch


def _batch(
    model: keras.Model, batch: int, input_shape: Sequence[int] | None, example: Any
) -> tuple[Any, ...]:
    """Return the specs of what ``train_step`` takes."""
    if example is not None:
        return tuple(_resized(part, batch) for part in example if part is not None)
    inputs = _inputs(model, batch, input_shape, None)
    return (inputs, _targets(model, inputs, batch))


def _inputs(model: keras.Model, batch: int, input_shape: Sequence[int] | None, example: Any) -> Any:
    if example is not None:
        x = example[0] if isinstance(example, tuple) else example
        return _resized(x, batch)
    if input_shape is not None:
        known = arguments.items(
            input_shape, "input_shape", "the shape of one sample, such as (224, 224, 3)",
            lambda size, name: arguments.whole(size, name, 1, what="a size"), least=0,
        )  # fmt: skip
        return tf.TensorSpec([batch, *known], keras.config.floatx())
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"model {model.name!r} is not built, so the shapes of its weights are not known. Give "
            "it a keras.Input, or pass input_shape=(224, 224, 3), the shape of one sample, or "
            "example=(x, y), a batch"
        )
    if any(None in each.shape[1:] for each in model.inputs):
        shapes = ", ".join(str(tuple(each.shape)) for each in model.inputs)
        raise ValueError(
            f"model {model.name!r} takes inputs of the shapes {shapes}; expected all sizes but the "
            "batch's. Pass input_shape=(224, 224, 3), the shape of one sample, or example=(x, y), "
            "a batch"
        )
    specs = [tf.TensorSpec([batch, *each.shape[1:]], each.dtype) for each in model.inputs]
    structure = getattr(model, "input", specs[0])  # a Sequential has none before its first call
    return tf.nest.pack_sequence_as(structure, specs)


def _resized(arrays: Any, batch: int) -> Any:
    def resized(array: Any) -> tf.TensorSpec:
        shape = tuple(array.shape)
        return tf.TensorSpec([batch, *shape[1:]] if shape else [], tf.as_dtype(array.dtype))

    return tf.nest.map_structure(
        lambda array: resized(array if hasattr(array, "shape") else tf.convert_to_tensor(array)),
        arrays,
    )


def _targets(model: keras.Model, inputs: Any, batch: int) -> Any:
    """Return specs like the outputs; of classes' numbers where a loss takes these."""
    outputs = _called(model, inputs)
    flat = keras.tree.flatten(outputs)
    losses = keras.tree.flatten(model.loss)
    losses = losses if len(losses) == len(flat) else losses[:1] * len(flat)
    specs = [_target(each, loss, batch) for each, loss in zip(flat, losses, strict=True)]
    return keras.tree.pack_sequence_as(outputs, specs)


def _target(output: Any, loss: Any, batch: int) -> tf.TensorSpec:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    if "sparse" in name.lower():
        return tf.TensorSpec([batch, *output.shape[1:-1]], tf.int32)
    return tf.TensorSpec([batch, *output.shape[1:]], keras.config.floatx())


def _traced(model: keras.Model, specs: tuple[Any, ...]) -> TracedStep:
    _called(model, specs[0])  # makes weights that wait for the shapes of inputs
    try:
        step = trace(model, specs)
    except Exception as error:
        raise _untraced(model, specs, error) from error
    if not isinstance(step, TracedStep):
        raise ValueError(
            f"a training step of model {model.name!r} applies gradients {len(step.steps)} times, "
            "as that of a GAN does. Plan a model whose step applies them once, such as one of its "
            "parts"
        )
    return step


def _called(model: keras.Model, inputs: Any) -> Any:
    """Return a model's outputs as Keras's symbols."""
    try:
        return model(
            tf.nest.map_structure(
                lambda spec: keras.KerasTensor(spec.shape, dtype=spec.dtype.name), inputs
            )
        )
    except Exception as error:
        raise _untraced(model, inputs, error) from error


def _untraced(model: keras.Model, specs: Any, error: Exception) -> ValueError:
    shapes = ", ".join(str(tuple(each.shape)) for each in tf.nest.flatten(specs))
    return ValueError(
        f"a training step of model {model.name!r} with a batch of the shapes {shapes} cannot be "
        f"traced: {error}. Pass example=(x, y), a batch as fit gets it"
    )


# ------------------------------------------------------------------ weights and slots


def _weight(optimizer: Any, variable: Any) -> Weight:
    return Weight(path_of(variable), _array(variable), _slots(optimizer, variable))


def _slots(optimizer: Any, variable: Any) -> tuple[Array, ...]:
    """Return what an optimizer keeps for a weight: a copy of the optimizer is built for it alone.

    So no more than one weight's slots are ever made.
    """
    kind = type(optimizer)
    try:
        alone = kind.from_config(optimizer.get_config())
    except Exception as error:
        raise ValueError(
            f"{kind.__name__} cannot be made again from its configuration, to see what it keeps "
            f"for a weight: {error}. Give it a get_config() that names all its arguments"
        ) from error
    alone.build([variable])
    return tuple(_array(v) for v in alone.variables if len(v.shape))


def _array(variable: Any) -> Array:
    return Array(tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
