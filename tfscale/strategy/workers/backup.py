"""Keras's callbacks on several workers: the first worker writes, and all restore its backup.

All workers must take part in a save, because they gather some content together, such as residuals.
Only the first worker writes the files. When a training resumes, a worker must not read a file that
another worker is writing, and all workers must read the same backup. So the first worker sends its
backup to the others, and all workers restore that backup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.bridge.backup import Backup, WholeBackup
from tfscale.bridge.callbacks import become
from tfscale.bridge.quiet import QUIET
from tfscale.native import Group, broadcast
from tfscale.strategy.extended import Extended

_PIECE = 64 << 20  # bytes per message
_HEAD = 4096  # bytes of the first message, which describes the backup


def arrange(model: Any, callbacks: Iterable[Any]) -> None:
    """Make callbacks write on the first worker only, before they get their model.

    Args:
        model: the model; callbacks of a model without a ``ScaleStrategy`` stay as they are.
        callbacks: the callbacks, equal on all workers.
    """
    extended = getattr(getattr(model, "distribute_strategy", None), "extended", None)
    if not isinstance(extended, Extended):
        return
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            become(callback, _FirstWorkersBackup)
            callback.tfscale_hosts = extended.hosts
            callback.delete_checkpoint &= _is_first(extended.hosts)
        if not _is_first(extended.hosts):
            for kind, quiet in QUIET.items():
                if isinstance(callback, kind):
                    become(callback, quiet)


def _is_first(hosts: Group | None) -> bool:
    return hosts is None or hosts.communicators[0].rank == 0


class _FirstWorkersBackup(WholeBackup):
    """Backup that the first worker writes and all workers restore."""

    tfscale_hosts: Group | None

    def _keep(self, content: memoryview, moment: dict[str, int]) -> None:
        if _is_first(self.tfscale_hosts):
            super()._keep(content, moment)

    def _found(self) -> Backup | None:
        hosts = self.tfscale_hosts
        if hosts is None:
            return super()._found()
        return _sent(hosts, super()._found()) if _is_first(hosts) else _received(hosts)


def _sent(hosts: Group, backup: Backup | None) -> Backup | None:
    """Send the first worker's backup to the other workers, and return it."""
    content, moment = backup or (b"", None)
    head = {"bytes": len(content), "moment": moment}
    _from_first(hosts, json.dumps(head).encode(), _HEAD)
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]
        _from_first(hosts, piece, len(piece))
    return backup


def _received(hosts: Group) -> Backup | None:
    """Receive the first worker's backup, on another worker; None if there is no backup."""
    head = _from_first(hosts, b"", _HEAD)
    size, moment = _checked(head)
    if moment is None:
        return None
    starts = range(0, size, _PIECE)
    content = b"".join(_from_first(hosts, b"", min(_PIECE, size - at)) for at in starts)
    return content, moment


def _from_first(hosts: Group, data: bytes, length: int) -> bytes:
    """Broadcast ``length`` bytes from the first worker, and return them on all workers."""
    (me,) = hosts.communicators
    own = np.frombuffer(data.ljust(-(-length // 4) * 4, b"\0"), np.int32)
    with tf.device(me.device):
        given = broadcast(own, me, name="a backup")
    return bytes(given.numpy().tobytes()[:length])


def _checked(data: bytes) -> tuple[int, dict[str, int] | None]:
    """Return the size and the moment of the first worker's backup.

    Raises:
        ValueError: the message is no description of a backup; that worker may run any program.
    """
    head = json.loads(data.rstrip(b"\0"))
    try:
        size, moment = head["bytes"], head["moment"]
        counts = [size] if moment is None else [size, moment["epoch"]]
    except (KeyError, TypeError):
        counts = [None]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"the first worker sent no backup, but {str(head)[:60]!r}")
    return size, moment
