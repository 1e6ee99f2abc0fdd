"""Questions about the running ``fit``: Keras does not tell, so the calls that go on are looked at.

Under Keras 2, which asks a strategy for less, only ``fitted`` has an answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.calls import called_by, caller
from tfscale.bridge.frames import frames, threads
from tfscale.bridge.hooks import TRAIN_FUNCTION
from tfscale.bridge.installed import (
    BUILDS_FROM_SHAPES,
    JOINS_WORKERS,
    KERAS_2,
    PREDICTS,
    REDUCES_LOGS,
)
from tfscale.bridge.models import overrides
from tfscale.bridge.objects import Trainer
from tfscale.bridge.tensorflow import COUNTS_BATCHES

if KERAS_2:

    class EpochIterator:
        """Reads the data of a ``fit``; Keras 2 has none, and so nothing is one."""
else:
    from keras.src.trainers.epoch_iterator import EpochIterator  # type: ignore[no-redef]

TRAINING = "train_step"
JUDGING = "test_step"
STEPS = (TRAINING, JUDGING)
_MEASURES = "_tfscale_measures"


def trace_again(model: Any) -> None:
    """Make a model trace its training step anew, with what callbacks have put in its place."""
    temporary = [each for each in TRAIN_FUNCTION.replacements(model) if each.is_running()]
    for each in temporary:
        each.trace_again()
    if not temporary:
        model.make_train_function(force=True)


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """A step of a model, as Keras passes it to ``Strategy.run``.

    Attributes:
        model: a ``keras.Model``, or a layer that its user has mixed with a ``Trainer``.
        kind: ``TRAINING`` or ``JUDGING``.
        changes_weights: whether it trains, and is no measurement that looks like a training.
    """

    model: Any
    kind: str
    changes_weights: bool

    @property
    def is_own(self) -> bool:
        """Whether the user has written the step, so that losses may be of any kind."""
        return overrides(self.model, self.kind)

    @property
    def makes_logs(self) -> bool:
        """Whether the user's code decides what the step returns."""
        return self.is_own or overrides(self.model, "compute_metrics")


def step_of(fn: Callable[..., Any]) -> ModelStep | None:
    """Return the step of a model that ``Strategy.run`` gets, or None if it gets something else.

    A user may also assign a function to ``model.train_step``, or make it a ``tf.function``: then it
    is found by the running fit.
    """
    if KERAS_2:
        return None
    owner = getattr(fn, "__self__", None)
    owner = owner if isinstance(owner, Trainer) else fitted()
    if owner is None:
        return None
    assigned = [name for name in STEPS if getattr(owner, name) is fn]
    method = getattr(fn, "__name__", None) if getattr(fn, "__self__", None) is owner else None
    for kind in (*assigned, method):
        if kind in STEPS:
            return ModelStep(owner, kind, kind == TRAINING and not getattr(fn, _MEASURES, False))
    return None


def as_measurement(step: Callable[..., Any], training: bool) -> None:
    """Let a function do what a step of a model does, and change nothing.

    Args:
        step: what will be such a step.
        training: whether layers do in it what they do in a step of training.
    """
    step.__name__ = TRAINING if training else JUDGING
    vars(step)[_MEASURES] = True


def fitted() -> Any:
    """Return the model whose ``fit``, ``evaluate`` or ``predict`` is running, or None."""
    return caller(Trainer)


def begins() -> tuple[keras.Model, list[Any], dict[str, Any]] | None:
    """Return the model, callbacks and length of the ``fit`` that enters the scope, or None.

    Each ``fit`` enters it once, to build its model, before it calls its callbacks.
    """
    near = list(itertools.islice(frames(sys._getframe(1)), 4))
    for builds, fit in itertools.pairwise(near):
        if (builds.f_code.co_name, fit.f_code.co_name) == (BUILDS_FROM_SHAPES, "fit"):
            given = fit.f_locals
            return given["self"], _listed(given["callbacks"]), _length(given)
    return None


def _length(fit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of steps and epochs that workers must share; None if not known yet."""
    iterator, validates = fit["epoch_iterator"], fit["validation_data"] is not None
    found = {"number of epochs": fit["epochs"]}
    found |= {name: fit[name] for name in ("initial_epoch", "batch_size")}
    found["number of steps in an epoch"] = iterator.steps_per_epoch or iterator._num_batches
    found["validation_data"] = "none" if not validates else "some"
    if validates:
        found["validation_freq"] = fit["validation_freq"]
        size = fit["validation_batch_size"] or fit["batch_size"] or 32
        found["number of steps in a validation"] = fit["validation_steps"] or _batches(
            fit["val_x"], size
        )
    return found


def _batches(x: Any, size: int) -> int | None:
    """Return the number of batches, if that can be told without reading any."""
    if isinstance(x, tf.data.Dataset):
        return known if (known := int(x.cardinality())) >= 0 else None
    if hasattr(x, "num_batches"):  # keras.utils.PyDataset
        return x.num_batches  # type: ignore[no-any-return]
    shape = getattr(tf.nest.flatten(x)[0], "shape", None)
    return math.ceil(shape[0] / size) if shape and shape[0] is not None else None


def _listed(callbacks: Any) -> list[Any]:
    return list(tf.nest.flatten(getattr(callbacks, "callbacks", callbacks) or []))


def compiling() -> keras.Model | None:
    """Return the model that is being compiled, or None, as with Keras 2."""
    return None if KERAS_2 else caller(Trainer, method="compile")


def iterator() -> Any:
    """Return the reader of the data of the ``fit`` that called, at whatever depth, or None."""
    return _variables_of_fit().get("epoch_iterator")


def callbacks_of_fit() -> list[Any]:
    """Return the callbacks of the ``fit`` that called, at whatever depth; none if none runs."""
    return _listed(_variables_of_fit().get("callbacks"))


def read_anew(steps: int) -> None:
    """Let the ``fit`` that called begin its data anew, with so many steps in each epoch from here.

    Called by a callback at the beginning of an epoch.
    """
    variables = _variables_of_fit()
    epochs, callbacks = variables["epoch_iterator"], variables["callbacks"]
    epochs.steps_per_epoch = steps
    epochs._current_iterator = None
    callbacks.set_params({**callbacks.params, "steps": steps})


def _variables_of_fit() -> Mapping[str, Any]:
    for frame in frames(sys._getframe(1)):
        if isinstance(frame.f_locals.get("epoch_iterator"), EpochIterator):
            return frame.f_locals
    return {}


class RunningFit:
    """A ``fit`` in progress, of which another thread may ask whether it has ended.

    Keras does not say when a ``fit`` has raised. To read the variables of a call that another
    thread makes can end the process; so a look only compares which calls there are, by their
    numbers. A number may be given again once its call has been freed, and with it the list of
    callbacks.
    """

    def __init__(self, frame: Any, callbacks: Any) -> None:
        self._number, self._callbacks = id(frame), weakref.ref(callbacks)

    def goes_on(self) -> bool:
        """Whether it has not ended yet.

        A function that returns during a look hides its callers: look again before you believe a no.
        """
        if self._callbacks() is None:
            return False
        return any(id(frame) == self._number for calls in threads() for frame in calls)


def running_with(callback: Any) -> RunningFit | None:
    """Return the ``fit`` of this thread that has a callback; None if none has."""
    for frame in frames(sys._getframe(1)):
        if frame.f_code.co_name == "fit":
            listed = frame.f_locals.get("callbacks")
            if any(one is callback for one in getattr(listed, "callbacks", ())):
                return RunningFit(frame, listed)
    return None


def element_spec(iterator: Any) -> Any:
    """Return the specification of a global batch that an iterator of ``fit`` distributes."""
    return iterator._distributed_dataset.element_spec


def forget_train_function(model: Any) -> None:
    """Let Keras trace a model's step anew: something that it looks at while tracing has changed."""
    model.train_function = None


def batch_size(iterator: Any) -> int | None:
    """Return the batch size of what an iterator of ``fit`` reads, if it is known beforehand."""
    for dataset in _with_sources(iterator.data_adapter.get_tf_dataset()):
        size = getattr(dataset, "_batch_size", None)
        known = None if size is None else tf.get_static_value(size)
        if known is not None:
            return int(known)
    return None


def _with_sources(dataset: Any) -> Iterator[Any]:
    waiting = [dataset]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += getattr(one, "_inputs", list)()


def trains() -> bool:
    """Whether this is called for a step of training, and not by an evaluation or a callback."""
    for frame in frames(sys._getframe(1)):
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.Callback):
            return False
        if name in _TRAIN + _JUDGE and isinstance(owner, Trainer):
            return name in _TRAIN
    return False


_TRAIN = ("fit", "train_on_batch")
_JUDGE = ("evaluate", "predict", "test_on_batch", "predict_on_batch")


def counts_batches() -> bool:
    """Whether TensorFlow asks how many replicas get a batch in the next step."""
    return called_by(COUNTS_BATCHES.__name__)


def reduces_logs() -> bool:
    """Whether Keras makes one number of what replicas log in a step."""
    return called_by(REDUCES_LOGS)


def wants_only_shapes() -> bool:
    """Whether Keras reads a batch of data for no more than its shapes."""
    return called_by(BUILDS_FROM_SHAPES)


def predicts() -> bool:
    """Whether Keras wants predictions, which it joins."""
    return called_by(PREDICTS)


def joins_predictions() -> bool:
    """Whether Keras asks if there are several workers, to join what they have predicted."""
    return called_by(JOINS_WORKERS, levels=2) and called_by(PREDICTS, levels=_FROM_PREDICTION)


# More frames than lie between the two: Keras walks through a structure with functions of its own.
_FROM_PREDICTION = 20
