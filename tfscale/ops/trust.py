"""Which files of the cache may be loaded as code.

Whoever can write a library that a user loads can run any code as that user, and a file that a
crash or a disk has damaged can end the process. So tfscale uses a folder or a file only if it
belongs to the user or to root and nobody else may write it, and a file only if a checksum beside
it matches.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from tfscale.files import replacing

_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def doubt(path: Path) -> str:
    """Why somebody else may have written a folder or a file; empty if nobody can have."""
    status = path.lstat()
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    # In a sticky folder nobody can exchange what belongs to another.
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OF_OTHERS and not sticky:
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def keep_others_out(path: Path) -> None:
    """Take the right to write from all but the owner; raises ``OSError`` if that is not us."""
    mode = stat.S_IMODE(path.lstat().st_mode)
    if mode & _OF_OTHERS:
        path.chmod(mode & ~_OF_OTHERS)


def seal(path: Path) -> None:
    """Write a file's checksum beside it; only so is it ``sound``."""
    keep_others_out(path)
    beside = checksum_file(path)
    with replacing(beside) as fresh:
        fresh.write_text(_checksum(path) + "\n")
        keep_others_out(fresh)


def is_sound(path: Path) -> bool:
    """Whether a file is as it was sealed, by this user or by root, under this name."""
    try:
        for each in (path.parent, path, checksum_file(path)):
            if doubt(each):
                return False
        return path.is_file() and _has_its_checksum(path)
    except OSError:
        return False


def checksum_file(path: Path) -> Path:
    """Where a file's checksum is kept."""
    return path.with_name(f"{path.name}.sha256")


def is_damaged(path: Path) -> bool:
    """Whether there is a checksum beside a file, and it is another file's."""
    return checksum_file(path).is_file() and not _has_its_checksum(path)


def _has_its_checksum(path: Path) -> bool:
    return checksum_file(path).read_bytes().strip() == _checksum(path).encode()


def _checksum(path: Path) -> str:
    """Of the name, too: one file of the cache must not stand for another."""
    return hashlib.sha256(path.name.encode() + b"\n" + path.read_bytes()).hexdigest()
