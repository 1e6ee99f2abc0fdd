"""``MACH.fit``: trains the models of this worker's repetitions one after another."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import keras

from tfscale.bridge.backup import begin_anew
from tfscale.cluster.sources import find_source
from tfscale.cluster.this_worker import is_first
from tfscale.training.extreme.data import BucketLabels
from tfscale.training.extreme.ensemble import Ensemble
from tfscale.training.extreme.files import Folder, check_built
from tfscale.training.extreme.heads import Heads
from tfscale.training.extreme.history import History

_log = logging.getLogger("tfscale")


def fit(
    ensemble: Ensemble, folder: Folder | None, data: dict[str, Any], given: dict[str, Any],
    validate: Callable[[], dict[str, float]] | None,
) -> History:  # fmt: skip
    """Train this worker's repetitions, but those that the folder has.

    Args:
        ensemble: the models.
        folder: files of trained models, or None.
        data: ``x``, ``y``, ``sample_weight``, ``class_weight`` and ``validation_data``.
        given: other arguments of ``keras.Model.fit``.
        validate: returns metrics of classes, or None without validation data.
    """
    shares = own_shares(ensemble, folder)
    for what, steps in {"x": "steps_per_epoch", "validation_data": "validation_steps"}.items():
        _check_reads(data[what], what, len(shares), steps, given.get(steps))
    history = History()
    for number, share in enumerate(shares, 1):
        heads = ensemble.heads_of(share)
        if folder is not None and _resume(ensemble, heads, folder, given["epochs"]):
            continue
        if len(shares) > 1 and given.get("verbose", 1) != 0:
            _log.info("%s, %d of %d", heads.name, number, len(shares))
        how = {**given, **_data_of(ensemble, heads, data)}
        own: list[keras.callbacks.Callback] = [CountsEpochs(heads)]
        if heads.stacked and validate is not None:
            ensemble.note(heads)
            own.append(ClassMetrics(validate))
        how["callbacks"] = [*own, *_callbacks(given.get("callbacks"), heads)]
        found = heads.model.fit(**how) if folder is None else _train(ensemble, heads, folder, how)
        heads.epochs = given["epochs"]
        history.add(heads.name, found.history)
        ensemble.note(heads)
    if validate is not None and not ensemble.shared_trunk and ensemble.trained:
        allowed, ensemble.allow_missing = ensemble.allow_missing, True
        try:
            history.add_metrics(validate())
        finally:
            ensemble.allow_missing = allowed
    return history


def own_shares(ensemble: Ensemble, folder: Folder | None) -> list[list[int]]:
    """Return for each model of this worker the repetitions that it predicts.

    A strategy of several workers trains all models on all of them.
    """
    source = None if ensemble.strategy.cluster_resolver else find_source(os.environ)
    if source is None or source.count == 1:
        return ensemble.shares()
    if ensemble.shared_trunk:
        raise ValueError(
            f"shared_trunk=True has one model, and {source.count} workers cannot share it: make "
            "the MACH in the scope of a tfscale.ScaleStrategy, or start one worker"
        )
    if folder is None:
        raise ValueError(
            f"{source.count} workers share the repetitions and send nothing: pass MACH a folder "
            "that all of them can write, from which each can load all repetitions"
        )
    return ensemble.shares(source.index, source.count)


class CountsEpochs(keras.callbacks.Callback):
    """Callback that counts a model's epochs, since a save may come before its ``fit`` ends.

    Args:
        heads: the model.
    """

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self._heads = heads

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self._heads.epochs = epoch + 1


class ClassMetrics(keras.callbacks.Callback):
    """Adds metrics of classes to those of each validation, for one model of all repetitions.

    Args:
        validate: returns the metrics.
    """

    def __init__(self, validate: Callable[[], dict[str, float]]) -> None:
        super().__init__()
        self._validate = validate

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Measure, if Keras has validated in this epoch, and add the result to the logs."""
        if logs is not None and "val_loss" in logs:
            logs.update({f"val_{name}": value for name, value in self._validate().items()})


def _resume(ensemble: Ensemble, heads: Heads, folder: Folder, epochs: int) -> bool:
    """Load what the folder has of a model; return whether it has all epochs."""
    done = folder.epochs(heads.name)
    if done and not (ensemble.is_trained(heads) and heads.model.optimizer.built):
        folder.read(heads.name, heads.model)
        heads.epochs = done
    if done < epochs:
        return False
    folder.forget_backup(heads.name)
    ensemble.note(heads)
    return True


def _train(ensemble: Ensemble, heads: Heads, folder: Folder, how: dict[str, Any]) -> Any:
    """Train a model from its last epoch in a folder, and write it there."""
    check_built(heads.model)
    backup = keras.callbacks.BackupAndRestore(folder.backup(heads.name), delete_checkpoint=False)
    how["initial_epoch"] = max(folder.epochs(heads.name), how.get("initial_epoch", 0))
    found = heads.model.fit(**{**how, "callbacks": [*how["callbacks"], backup]})
    begin_anew(heads.model)
    if not ensemble.strategy.cluster_resolver or is_first():  # all others have the same weights
        folder.write(heads.name, heads.model, how["epochs"])
        folder.forget_backup(heads.name)
    return found


def _data_of(ensemble: Ensemble, heads: Heads, data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of ``fit`` with the buckets of a model in place of labels."""
    of_model = ensemble.labels, ensemble.table[heads.repetitions], heads.stacked
    arrays = BucketLabels(*of_model, data["class_weight"]).data(
        data["x"], data["y"], data["sample_weight"]
    )
    found = dict(zip(("x", "y", "sample_weight"), arrays, strict=True))
    if (validation := data["validation_data"]) is not None:
        parts = validation if isinstance(validation, (tuple, list)) else (validation,)
        parts = BucketLabels(*of_model, None).data(*parts, *[None] * (3 - len(parts)))
        kept = tuple(part for part in parts if part is not None)
        found["validation_data"] = kept if len(kept) > 1 else kept[0]
    return found


def _callbacks(given: Any, heads: Heads) -> list[Any]:
    given = given(heads.name) if callable(given) else given
    return [*given] if isinstance(given, (list, tuple)) else [given] if given is not None else []


def _check_reads(data: Any, what: str, models: int, steps: str, given: Any) -> None:
    if hasattr(data, "__next__") and models > 1 and not given:
        raise ValueError(
            f"{what} is a {type(data).__name__}, which can be read once, and {models} models read "
            "it one after another: give a tf.data.Dataset or a keras.utils.PyDataset, or "
            f"{steps} if it has no end, or make the MACH with shared_trunk=True"
        )
