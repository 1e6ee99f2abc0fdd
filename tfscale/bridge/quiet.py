"""Keras's callbacks that write, for workers other than the first: they compute and write nothing.

Some of what a callback reads, all workers gather together: weights that differ between replicas,
for example. So each class here reads whatever Keras's class reads, in the same order.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.backup import InMemory
from tfscale.bridge.installed import KERAS_2


class QuietCheckpoint(keras.callbacks.ModelCheckpoint):
    """A checkpoint that takes part in saves, and writes nothing."""

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if not self._should_save_model(epoch, batch, logs, self.filepath):
            return
        if self.save_weights_only:
            self.model.save_weights(InMemory(".weights.h5"))
        elif self.filepath.endswith(".keras"):
            self.model.save(InMemory(".keras"))
        else:
            with tempfile.TemporaryDirectory(prefix="tfscale-") as folder:
                self.model.save(os.path.join(folder, "checkpoint.h5"))


class QuietTensorBoard(keras.callbacks.TensorBoard):
    """A board that takes part in saves of embeddings, and writes nothing."""

    @property
    def _train_writer(self) -> Any:
        return tf.summary.create_noop_writer()

    _val_writer = _train_writer

    def _configure_embeddings(self) -> None:
        pass

    def _log_embeddings(self, epoch: int) -> None:
        self.model.save_weights(InMemory(".weights.h5"))

    def _start_trace(self) -> None:
        pass

    def _stop_trace(self, batch: int | None = None) -> None:
        pass


class QuietCSVLogger(keras.callbacks.CSVLogger):
    """Keras's class, whose file is the null device."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the null device."""
        self.filename = os.devnull
        super().on_train_begin(logs)


class QuietRemoteMonitor(keras.callbacks.RemoteMonitor):
    """A monitor that sends nothing."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Send nothing."""


QUIET: dict[type, type] = {
    keras.callbacks.ModelCheckpoint: QuietCheckpoint,
    keras.callbacks.TensorBoard: QuietTensorBoard,
    keras.callbacks.CSVLogger: QuietCSVLogger,
    keras.callbacks.RemoteMonitor: QuietRemoteMonitor,
}

if not KERAS_2:

    class QuietOrbaxCheckpoint(keras.callbacks.OrbaxCheckpoint):
        """Reads the model's state when Keras's class saves it, and writes nothing."""

        def _save_checkpoint(self, step: int, logs: Any = None) -> None:
            self.model.get_state_tree(value_format="numpy_array")

    QUIET[keras.callbacks.OrbaxCheckpoint] = QuietOrbaxCheckpoint
