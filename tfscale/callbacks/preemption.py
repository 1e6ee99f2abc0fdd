"""A callback that saves and ends the program before the machine is taken away."""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.backup import WholeBackup
from tfscale.bridge.installed import KERAS_2
from tfscale.callbacks.sigterm import Sigterm
from tfscale.support import arguments

_log = logging.getLogger("tfscale")


class Preempted(SystemExit):
    """Exception that ends ``fit`` and, if nothing catches it, the program."""


class Preemption(WholeBackup):
    """Keras's ``BackupAndRestore``, which on SIGTERM also saves and ends the program.

    All workers finish the same step, save, and raise ``Preempted`` from ``fit``, which ends the
    program with ``exit_code``. If you start the program again, the training continues from there.
    If the signal comes after the last step, workers save and end, too; started again, ``fit``
    restores the trained model and returns at once.

    Every ``check_every`` steps and at the end of each epoch, workers exchange one number to learn
    whether one of them got the signal; a single worker exchanges nothing.

    Args:
        backup_dir: as for ``BackupAndRestore``.
        save_freq: as for ``BackupAndRestore``: how often to save without a signal.
        check_every: largest number of steps between a signal and the save. These steps and a save
            must take less time than you get between the signal and the end (often 30 seconds).
        exit_code: exit code of the program. If your scheduler restarts jobs only after a failure,
            choose another number than 0.
        settings: further arguments of ``BackupAndRestore``.

    Example:
        >>> preemption = tfscale.callbacks.Preemption("backup")  # a folder that all workers see
        >>> history = model.fit(x, y, verbose=0, callbacks=[preemption])
    """

    _sigterm: Sigterm  # exists while it trains

    def __init__(
        self,
        backup_dir: str,
        save_freq: str | int = "epoch",
        check_every: int = 10,
        exit_code: int = 0,
        **settings: Any,
    ) -> None:
        if KERAS_2:
            raise ValueError(
                f"Preemption needs Keras 3, and this is Keras {keras.__version__}: use its own "
                "BackupAndRestore(..., save_before_preemption=True)"
            )
        arguments.path(backup_dir, "backup_dir")
        if not (isinstance(save_freq, str) and save_freq == "epoch"):
            save_freq = arguments.whole(
                save_freq, "save_freq", 1, what="'epoch' or a number of steps"
            )
        check_every = arguments.whole(check_every, "check_every", 1, what="a number of steps")
        what = "an exit code of a program"
        exit_code = arguments.whole(exit_code, "exit_code", 0, 255, what=what)
        super().__init__(backup_dir, save_freq, **settings)
        self._check_every = check_every
        self._exit_code = exit_code
        self._steps = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Start to listen for SIGTERM."""
        super().on_train_begin(logs)
        self._sigterm = Sigterm(self)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save and end, if it is time to check and a worker got the signal."""
        super().on_train_batch_end(batch, logs)
        self._steps += 1
        if self._steps % self._check_every == 0 and self._some_worker_got_it():
            self._save_model()
            self._leave()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save and end after validation, if a worker got the signal."""
        super().on_epoch_end(epoch, logs)
        if self._some_worker_got_it():
            if self.save_freq != "epoch":
                self._save_model()
            self._leave()

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the former handler of SIGTERM; save and end if a worker got the signal."""
        self._sigterm.stop()
        if self._some_worker_got_it():
            self._current_epoch = (self.params or {}).get(
                "epochs", self._current_epoch
            )  # an early end of training is its end
            self._save_model()
            self._leave()
        super().on_train_end(logs)

    def _leave(self) -> None:
        """Log why this worker ends, and raise ``Preempted``."""
        self._sigterm.stop()
        self._wait_for_the_save()
        _log.info(
            "%s got SIGTERM: saved at step %d, exiting with %s",
            "this worker" if self._sigterm.got_it else "another worker",
            self._steps_so_far(),
            self._exit_code,
        )
        raise Preempted(self._exit_code)

    def _wait_for_the_save(self) -> None:
        """Wait until the first worker has written the save.

        Many launchers end all processes as soon as one ends with another code than 0.
        """
        self._on_some_worker(False)

    def _steps_so_far(self) -> int:
        optimizer = getattr(self.model, "optimizer", None)
        return self._steps if optimizer is None else int(optimizer.iterations.numpy())

    def _some_worker_got_it(self) -> bool:
        return self._on_some_worker(self._sigterm.heard)

    def _on_some_worker(self, holds: bool) -> bool:
        strategy = self.model.distribute_strategy
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return holds
        if strategy.num_replicas_in_sync == len(strategy.extended.worker_devices):
            return holds  # all replicas belong to this worker
        own = strategy.experimental_distribute_values_from_function(
            lambda _: tf.constant(float(holds))
        )
        return float(strategy.reduce("SUM", own, axis=None)) > 0
