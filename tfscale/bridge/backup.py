"""A safe ``BackupAndRestore``: a program that is killed never leaves half a backup.

Keras writes new weights over the last ones, and then the epoch into a second file: a program that
is killed in between leaves new weights with an old epoch, and trains some steps twice. Here one
file has everything: weights, optimizer, residuals and seeds, and the epoch. Keras can read it.
"""

from __future__ import annotations

import io
import json
import logging
import os
from typing import Any

import h5py
import keras
import tensorflow as tf

from tfscale.bridge.callbacks import steps_of_epoch
from tfscale.support import sealed

_log = logging.getLogger("tfscale")

_UNSEALED = (
    "%s was written by Keras alone. Its weights are restored, with the epoch that is in %s; "
    "tfscale cannot check whether the two belong together."
)

_SECOND = (
    "%s cannot be restored: %s. It was renamed to %s, and the backup before it, of epoch %d, is "
    "restored."
)

_NONE_WHOLE = (
    "No backup in {folder} can be restored: {reasons}. Copy an undamaged one there, or remove the "
    "folder to train from the beginning."
)

_NOT_BUILT = (
    "{callback} can only restore a model that is built, and {model!r} is not: before fit, call the "
    "model on a batch or give it an Input."
)

# All bytes of a file that Keras can load weights from, and the epoch and the batch of the save.
Backup = tuple[bytes, dict[str, int]]


class InMemory(io.BytesIO):
    """A file in memory, whose name tells Keras its format.

    HDF5 ends the program some time after it finds a disk full, so it writes to memory only.
    """

    def __init__(self, name: str, content: bytes = b"") -> None:
        super().__init__(content)
        self._name = name

    def __str__(self) -> str:
        return self._name


def begin_anew(model: Any) -> None:
    """Let the next ``fit`` begin at its own epoch, and not at that of the last backup."""
    model._initial_epoch = None


class WholeBackup(keras.callbacks.BackupAndRestore):
    """A callback with the arguments and the file names of Keras's; see the module."""

    _trained = False  # whether all steps of the epoch are done

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the last backup."""
        if not self.model.built:
            raise ValueError(_NOT_BUILT.format(callback=type(self).__name__, model=self.model.name))
        self._load_model()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch: Keras's own class would count from 0 again in each ``fit``."""
        self._current_epoch = epoch
        self._trained = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save after every ``save_freq`` batches."""
        steps = steps_of_epoch(self)
        self._trained = steps is not None and batch + 1 >= steps
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save at the end of an epoch, unless batches are counted."""
        self._trained = False  # Keras counts it itself
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the backup, and the epoch: Keras's class would begin the next ``fit`` there."""
        begin_anew(self.model)
        super().on_train_end(logs)

    def _load_model(self) -> None:
        backup = self._found()
        if backup is None:
            return
        content, moment = backup
        if self.model.optimizer is not None and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self.model.load_weights(InMemory(self._weights_path, content))
        self.model._initial_epoch = self._current_epoch = moment["epoch"]

    def _save_model(self) -> None:
        content = InMemory(self._weights_path)
        self.model.save_weights(content)
        moment = {"epoch": self._current_epoch, "batch": self._last_batch_seen}
        if self._trained:  # a training that goes on must not train this epoch again
            moment = {"epoch": self._current_epoch + 1, "batch": 0}
        self._keep(content.getbuffer(), moment)

    def _keep(self, content: memoryview, moment: dict[str, int]) -> None:
        try:
            tf.io.gfile.makedirs(self.backup_dir)
            previous = self._prev_weights_path if self.double_checkpoint else None
            sealed.write(self._weights_path, content, moment, previous)
            self._tell_keras(moment)
        except (OSError, tf.errors.OpError) as error:
            raise OSError(
                getattr(error, "errno", None),
                f"a backup of {len(content)} bytes could not be written to {self._weights_path}; "
                f"the last backup there is unchanged: {error}",
            ) from error

    def _tell_keras(self, moment: dict[str, int]) -> None:
        """Write the file that Keras reads where a training goes on without this class."""
        with tf.io.gfile.GFile(self._training_metadata_path, "w") as file:
            file.write(json.dumps(moment))

    def _found(self) -> Backup | None:
        """Return the last backup that is whole, or None if there is none at all."""
        sealed.remove_partial(self._weights_path)
        last, before = self._weights_path, self._prev_weights_path
        reasons = {}
        for path in filter(tf.io.gfile.exists, (last, before)):
            try:
                backup = self._read(path)
            except (OSError, ValueError, tf.errors.OpError) as error:
                reasons[path] = error
                continue
            if reasons:
                aside = f"{last}.damaged"  # the next save makes the last one the one before
                tf.io.gfile.rename(last, aside, overwrite=True)
                _log.warning(_SECOND, last, reasons[last], aside, backup[1]["epoch"])
            return backup
        if reasons:
            said = "; ".join(f"{path}: {error}" for path, error in reasons.items())
            raise ValueError(_NONE_WHOLE.format(folder=self.backup_dir, reasons=said))
        return None

    def _read(self, path: str) -> Backup:
        content, moment = sealed.read(path)
        if moment is None:
            moment = self._read_keras(path, content)
        return content, moment

    def _read_keras(self, path: str, content: bytes) -> dict[str, int]:
        """Return the epoch of a backup that Keras alone has written."""
        with h5py.File(io.BytesIO(content), "r"):
            pass  # it has its end
        beside = self._training_metadata_path
        beside += ".bkp" if path == self._prev_weights_path else ""
        if not tf.io.gfile.exists(beside):
            raise ValueError(f"it is not from tfscale, and {os.path.basename(beside)} is missing")
        with tf.io.gfile.GFile(beside, "r") as file:
            moment = {"epoch": int(json.loads(file.read())["epoch"])}
        _log.warning(_UNSEALED, path, beside)
        return moment
