"""The installed Keras: its version, and whether it has the private names that tfscale uses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any

import keras

KERAS_2 = keras.__version__.startswith("2.")

_MISSING = (
    "Keras {version} has no {missing}. A ScaleStrategy needs that: without it, it would train and "
    "silently give other results. This tfscale is tested with Keras 3.15 (TensorFlow 2.20 and "
    '2.21) and with Keras 2.15: run pip install "keras==3.15.*", or install a newer tfscale.'
)

_TF_KERAS = (
    "this model is of tf_keras, which is Keras 2, and tfscale trains models of Keras 3 here. "
    "tf.keras is tf_keras where TF_USE_LEGACY_KERAS is set, and Ray's TensorflowTrainer sets it. "
    "Write `import keras` and keras.Model in place of tf.keras.Model, or unset "
    "TF_USE_LEGACY_KERAS before TensorFlow is imported."
)

# Functions that are recognised by their names where they call.
BUILDS_FROM_SHAPES = "_maybe_symbolic_build"
PREDICTS = "one_step_on_data_distributed"
REDUCES_LOGS = "reduce_per_replica"
JOINS_WORKERS = "_collective_all_reduce_multi_worker"

# What a fit that runs is asked: the names of its variables.
OF_FIT = (
    *("self", "callbacks", "epochs", "initial_epoch", "batch_size", "epoch_iterator"),
    *("validation_data", "validation_freq", "validation_batch_size", "validation_steps", "val_x"),
)

if KERAS_2:
    _ATTRIBUTES: tuple[tuple[type, str, tuple[str, ...]], ...] = ()
else:
    from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
    from keras.src.trainers.epoch_iterator import EpochIterator

    # Attributes that objects get in a method, and that are read or hidden.
    _ATTRIBUTES = (
        (keras.Model, "compile", ("_compile_loss", "_compile_metrics", "_loss_tracker")),
        (keras.Model, "__init__", ("_distribute_strategy",)),
        (CompileLoss, "build", ("_flat_losses",)),
        (CompileMetrics, "__init__", ("_user_metrics", "_user_weighted_metrics")),
        (keras.losses.Loss, "__call__", ("reduce_weighted_values", "name_scope")),
        (keras.metrics.MeanMetricWrapper, "update_state", ("super",)),
        (keras.optimizers.Optimizer, "__init__", ("_learning_rate", "_trainable_variables")),
        (keras.optimizers.Optimizer, "__init__", ("_iterations",)),
        (keras.layers.BatchNormalization, "build", ("_reduction_axes",)),
        (EpochIterator, "__iter__", ("_enumerate_iterator",)),
        (
            EpochIterator,
            "_enumerate_iterator",
            ("_get_iterator", "_current_iterator", "steps_per_epoch"),
        ),
        (PyDatasetAdapter, "__init__", ("enqueuer", "shuffle")),
    )


def backend() -> str:
    """Return the name of the backend that Keras computes with."""
    return "tensorflow" if KERAS_2 else str(keras.config.backend())


def refuse_keras_2(what: str) -> None:
    """Refuse a feature that needs Keras 3 if Keras 2 is installed.

    Args:
        what: who does what of Keras 3, such as ``"Recompute watches layers of Keras 3"``.
    """
    if KERAS_2:
        raise ValueError(
            f"{what}, and this is Keras {keras.__version__}: install TensorFlow 2.16 or later "
            "without TF_USE_LEGACY_KERAS"
        )


def refuse_tf_keras(step: Any) -> None:
    """Refuse a step of the package tf_keras: Keras 2 beside the Keras 3 that tfscale knows."""
    if str(getattr(step, "__module__", "")).startswith("tf_keras."):
        raise ValueError(_TF_KERAS)


@functools.cache
def check() -> None:
    """Refuse a Keras 3 without a name that would not be missed when it is looked up or hidden."""
    missing = [] if KERAS_2 else [name for name, there in _names().items() if not there]
    if missing:
        raise ImportError(
            _MISSING.format(version=keras.__version__, missing=" and no ".join(missing))
        )


def _named_in(kind: type, method: str) -> set[str]:
    """Return the attributes that a method, or one that it extends, reads or sets."""
    each = (vars(one)[method] for one in kind.__mro__ if method in vars(one))
    return {
        name
        for one in each
        if hasattr(code := inspect.unwrap(one), "__code__")
        for name in code.__code__.co_names
    }


def _names_within(code: CodeType) -> set[str]:
    """Return the names that a function uses, and those of functions within it."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names_within, inner))


def _names() -> Mapping[str, bool]:
    model, loss = keras.Model, keras.losses.Loss
    names: list[tuple[Any, tuple[str, ...]]] = [
        (
            model,
            (
                *(BUILDS_FROM_SHAPES, "_symbolic_build", "_aggregate_additional_loss"),
                *("compute_loss", "add_loss", "train_step", "test_step", "_flatten_layers"),
            ),
        ),
        (keras.optimizers.Optimizer, ("apply", "_clip_gradients", "_get_variable_index", "build")),
        (keras.layers.BatchNormalization, ("_moments",)),
        (loss, ("call",)),
        (keras.Variable, ("_initialize",)),
        (keras.callbacks.BackupAndRestore, ("_load_model", "_save_model")),
        (keras.callbacks.ModelCheckpoint, ("_save_model", "_should_save_model")),
        (keras.callbacks.OrbaxCheckpoint, ("_save_checkpoint",)),
        (
            keras.callbacks.TensorBoard,
            (
                *("_train_writer", "_val_writer", "_start_trace", "_stop_trace"),
                *("_configure_embeddings", "_log_embeddings"),
            ),
        ),
    ]
    found = {f"{kind.__name__}.{name}": hasattr(kind, name) for kind, of in names for name in of}
    for kind, method, of in _ATTRIBUTES:
        found |= {f"{kind.__name__}.{name}": name in _named_in(kind, method) for name in of}
    of_fit = inspect.unwrap(model.fit).__code__.co_varnames
    found |= {f"variable {name!r} in Model.fit": name in of_fit for name in OF_FIT}
    logs = REDUCES_LOGS in _names_within(model._make_function.__code__)
    found[f"{REDUCES_LOGS!r} in Model._make_function"] = logs
    reduces = getattr(inspect.getmodule(model._make_function), REDUCES_LOGS, None)
    joins = reduces is not None and JOINS_WORKERS in _names_within(reduces.__code__)
    found[f"{JOINS_WORKERS!r} in {REDUCES_LOGS}"] = joins
    code = model.make_predict_function.__code__
    known = code.co_varnames + code.co_cellvars
    return found | {f"{PREDICTS!r} in Model.make_predict_function": PREDICTS in known}
