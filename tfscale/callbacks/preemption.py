"""Save and end the program when the machine is about to be taken away."""

from __future__ import annotations

import signal
import threading
from typing import Any

import keras
import tensorflow as tf


class Preempted(SystemExit):
    """Ends ``fit`` and, if nobody catches it, the program."""


class Preemption(keras.callbacks.BackupAndRestore):
    """Keras's ``BackupAndRestore`` that also saves, and ends the program, on SIGTERM.

    All workers finish the same step, save, and raise ``Preempted`` from ``fit``, which
    ends the program with ``exit_code``. Started again, the training goes on from there.

    That workers agree costs one exchange of a number every ``check_every`` steps; with
    one worker there is none.

    Args:
        backup_dir: as for ``BackupAndRestore``.
        save_freq: as for ``BackupAndRestore``: how often to save without being told to.
        check_every: how many steps a signal may wait. Choose it so that they, and saving,
            take less than the time between the signal and the end (often 30 seconds).
        exit_code: of the program. Schedulers that start a job again only if it failed
            want another than 0.
        settings: what else ``BackupAndRestore`` takes.

    Example:
        >>> model.fit(x, y, callbacks=[tfscale.callbacks.Preemption("/shared/backup")])
    """

    def __init__(
        self,
        backup_dir: str,
        save_freq: str | int = "epoch",
        check_every: int = 10,
        exit_code: int = 0,
        **settings: Any,
    ) -> None:
        if check_every < 1:
            raise ValueError(f"check_every is a number of steps above 0, got {check_every}")
        super().__init__(backup_dir, save_freq, **settings)
        self._check_every = check_every
        self._exit_code = exit_code
        self._told = threading.Event()
        self._steps = 0
        self._before: Any = signal.SIG_DFL

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        super().on_train_begin(logs)
        self._before = signal.signal(signal.SIGTERM, lambda *_: self._told.set())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras, which after a restart counts saved epochs from 0 again."""
        self._current_epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        super().on_train_batch_end(batch, logs)
        self._steps += 1
        if self._steps % self._check_every == 0 and self._anybody_told():
            self._save_model()
            self._stop_listening()
            raise Preempted(self._exit_code)

    def on_train_end(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._stop_listening()
        super().on_train_end(logs)

    def _stop_listening(self) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _anybody_told(self) -> bool:
        told = self._told.is_set()
        strategy = self.model.distribute_strategy
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if not several or strategy.num_replicas_in_sync == 1:
            return told
        own = strategy.experimental_distribute_values_from_function(lambda _: float(told))
        return float(strategy.reduce("SUM", own, axis=None)) > 0
