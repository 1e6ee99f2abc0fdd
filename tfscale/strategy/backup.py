"""Files that Keras's callbacks would write from every worker: one worker's count.

Keras saves on all workers, into the same file where they share a disk. All must save,
since what they save together (what low precision has lost, for one) they also gather
together; but the first worker alone may write what the user asked for. The others write
into folders of their own, which vanish with them.

Who trains on must not read files that another is about to write, or that differ: so
before a training the first worker sends its backup to the others, and all restore that.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.ops import Group, broadcast

_PIECE = 16 << 20  # numbers of 4 bytes in a message
_LIST = 4096  # bytes that the list of files may have


class Backups:
    """Puts right where callbacks read and write.

    Args:
        hosts: one rank for each worker; None if there is only one.
    """

    def __init__(self, hosts: Group | None) -> None:
        self._hosts = hosts
        self._folders: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def arrange(self, callbacks: Iterable[Any]) -> None:
        """Before ``fit`` calls them; all workers have the same callbacks."""
        if self._hosts is None:
            return
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                self._arrange_backup(callback)
            elif isinstance(callback, keras.callbacks.ModelCheckpoint) and not self._first:
                kind = ".weights.h5" if callback.save_weights_only else ".keras"
                callback.filepath = f"{self._own(str(callback.filepath))}/checkpoint{kind}"

    @property
    def _first(self) -> bool:
        assert self._hosts is not None
        return self._hosts.communicators[0].rank == 0

    def _arrange_backup(self, callback: keras.callbacks.BackupAndRestore) -> None:
        if not self._first:
            keras.callbacks.BackupAndRestore.__init__(
                callback,
                self._own(str(callback.backup_dir)),
                callback.save_freq,
                callback.double_checkpoint,
                callback.delete_checkpoint,
            )
        self._give(callback.backup_dir)

    def _own(self, folder: str) -> str:
        """This worker's folder in place of what all were given."""
        for own in self._folders.values():
            if folder.startswith(own.name):
                return own.name
        if folder not in self._folders:
            self._folders[folder] = tempfile.TemporaryDirectory(prefix="tfscale-backup-")
        return self._folders[folder].name

    def _give(self, folder: str) -> None:
        """Make the files in a folder those of the first worker."""
        for name, size in _checked(self._given(_list(folder) if self._first else b"", _LIST)):
            path = os.path.join(folder, name)
            if self._first:
                with tf.io.gfile.GFile(path, "rb") as file:
                    self._send(file, size)
            else:
                tf.io.gfile.makedirs(folder)
                with tf.io.gfile.GFile(path, "wb") as file:
                    self._receive(file, size)

    def _send(self, file: Any, size: int) -> None:
        for start in range(0, size, 4 * _PIECE):
            length = min(4 * _PIECE, size - start)
            self._given(file.read(length), length)

    def _receive(self, file: Any, size: int) -> None:
        for start in range(0, size, 4 * _PIECE):
            file.write(self._given(b"", min(4 * _PIECE, size - start)))

    def _given(self, data: bytes, length: int) -> bytes:
        """The first worker's ``length`` bytes."""
        assert self._hosts is not None
        (me,) = self._hosts.communicators
        own = np.frombuffer(data.ljust(-(-length // 4) * 4, b"\0"), np.int32)
        with tf.device(me.device):
            given = broadcast(own, me, name="a backup")
        return bytes(given.numpy().tobytes()[:length])


def _list(folder: str) -> bytes:
    names = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
    files = {
        name: tf.io.gfile.stat(os.path.join(folder, name)).length
        for name in names
        if not tf.io.gfile.isdir(os.path.join(folder, name))
    }
    data = json.dumps(files).encode()
    if len(data) > _LIST:
        raise ValueError(f"{folder} holds {len(files)} files; a backup needs a folder of its own")
    return data


def _checked(data: bytes) -> list[tuple[str, int]]:
    """Names and sizes, if they are; a name is of a file in the folder and nowhere else."""
    files = json.loads(data.rstrip(b"\0"))
    if not isinstance(files, dict):
        raise ValueError(f"the first worker's backup is no list of files, but {files!r}")
    for name, size in files.items():
        inside = os.path.basename(name) == name and name not in ("", ".", "..")
        if not inside or type(size) is not int or size < 0:
            raise ValueError(f"the first worker's backup holds {name!r} of size {size!r}")
    return list(files.items())
