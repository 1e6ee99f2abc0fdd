"""Keras's callbacks on several workers: the first worker writes, and all restore its backup.

All workers must take part in a save, since they gather some of its content together (residuals,
for example), but only the first worker writes the files. When a training goes on, workers must not
read files that another one is about to write, or that differ. So the first worker sends its backup
to the others, and all restore that.
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
from tfscale.ops import Group, broadcast
from tfscale.strategy.extended import Extended

_PIECE = 64 << 20  # bytes of a message
_HEAD = 4096  # bytes of the message that says what comes


def arrange(model: Any, callbacks: Iterable[Any]) -> None:
    """Make callbacks that are about to get a model write on the first worker only.

    Args:
        model: if it belongs to no ``ScaleStrategy``, its callbacks stay as they are.
        callbacks: all workers have the same.
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
    """The first worker's backup, on all of them."""

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
    """Called by the first worker."""
    content, moment = backup or (b"", None)
    head = {"bytes": len(content), "moment": moment}
    _from_first(hosts, json.dumps(head).encode(), _HEAD)
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]
        _from_first(hosts, piece, len(piece))
    return backup


def _received(hosts: Group) -> Backup | None:
    """Called by the others."""
    head = _from_first(hosts, b"", _HEAD)
    size, moment = _checked(head)
    if moment is None:
        return None
    starts = range(0, size, _PIECE)
    content = b"".join(_from_first(hosts, b"", min(_PIECE, size - at)) for at in starts)
    return content, moment


def _from_first(hosts: Group, data: bytes, length: int) -> bytes:
    """The first worker's ``length`` bytes."""
    (me,) = hosts.communicators
    own = np.frombuffer(data.ljust(-(-length // 4) * 4, b"\0"), np.int32)
    with tf.device(me.device):
        given = broadcast(own, me, name="a backup")
    return bytes(given.numpy().tobytes()[:length])


def _checked(data: bytes) -> tuple[int, dict[str, int] | None]:
    """The size of the first worker's backup and its moment; the worker may run any program."""
    head = json.loads(data.rstrip(b"\0"))
    try:
        size, moment = head["bytes"], head["moment"]
        counts = [size] if moment is None else [size, moment["epoch"]]
    except (KeyError, TypeError):
        counts = [None]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"the first worker sent no backup, but {str(head)[:60]!r}")
    return size, moment
