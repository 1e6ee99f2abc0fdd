"""Sealed files: written whole or not at all, to another name, read again to check, then renamed.

The content is followed by metadata and a checksum of both. So a reader knows that the file is
intact, and that the metadata belong to this content. Readers of formats that know their own length,
such as HDF5, ignore the bytes after the content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

_MARK = b"sealed by tfscale, format 1\n"
_LENGTH = 8  # bytes of the number that holds the length of the metadata
_DIGEST = hashlib.sha256().digest_size
_PARTIAL = ".partial-"
_PIECE = 1 << 20  # bytes that are copied at once: few, so that they stay in the cache

_files = tf.io.gfile


class Damaged(ValueError):
    """Raised if a file has a checksum that does not match its content."""


def write(
    path: str, content: memoryview, words: Mapping[str, Any], previous: str | None = None
) -> None:
    """Write a file whole.

    Args:
        path: the path of the file.
        content: the content of the file.
        words: the metadata, as JSON.
        previous: a path to which an existing file is moved; None replaces it.
    """
    end = json.dumps(words).encode()
    end += len(end).to_bytes(_LENGTH, "big")
    digest = hashlib.sha256(content)
    digest.update(end)
    beside = f"{path}{_PARTIAL}{uuid.uuid4().hex[:8]}"
    try:
        parts = [content, memoryview(end + digest.digest() + _MARK)]
        _write(beside, parts)
        _check(beside, parts)
        if previous is not None and _files.exists(path):
            _files.rename(path, previous, overwrite=True)
        _files.rename(beside, path, overwrite=True)
        _settle(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(OSError, tf.errors.OpError):
            _files.remove(beside)
        raise


def read(path: str) -> tuple[bytes, dict[str, Any] | None]:
    """Return a file's bytes and metadata; the metadata are None if ``write`` did not write it."""
    with _opened(path, "rb") as file:
        data: bytes = file.read()
    if not data.endswith(_MARK):
        return data, None
    sealed = memoryview(data)[: -len(_MARK) - _DIGEST]
    if hashlib.sha256(sealed).digest() != data[len(sealed) : len(sealed) + _DIGEST]:
        raise Damaged(f"{path} is damaged: its content does not match its checksum")
    length = int.from_bytes(sealed[-_LENGTH:], "big")
    words = json.loads(bytes(sealed[-_LENGTH - length : -_LENGTH]))
    return data, words


def remove_partial(path: str) -> None:
    """Remove the partial files that a killed program has left beside a file."""
    for left in _files.glob(f"{path}{_PARTIAL}*"):
        _files.remove(left)


def _opened(path: str, mode: str) -> Any:
    return _files.GFile(path, mode) if _is_remote(path) else open(path, mode)


def _is_remote(path: str) -> bool:
    return "://" in path


def _write(path: str, parts: list[memoryview]) -> None:
    with _opened(path, "wb") as file:
        for piece in _pieces(parts):
            file.write(piece)
        if not _is_remote(path):
            file.flush()
            os.fsync(file.fileno())  # otherwise a machine that loses power keeps only the name


def _check(path: str, parts: list[memoryview]) -> None:
    with _opened(path, "rb") as file:
        if not all(file.read(len(piece)) == piece for piece in _pieces(parts)) or file.read(1):
            raise OSError(
                f"{path} differs from what was written: check the disk and its file system"
            )


def _pieces(parts: list[memoryview]) -> Iterator[bytes]:
    for part in parts:
        for start in range(0, len(part), _PIECE):
            yield bytes(part[start : start + _PIECE])


def _settle(folder: str) -> None:
    """Make the names in a folder survive a loss of power."""
    if _is_remote(folder):
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
