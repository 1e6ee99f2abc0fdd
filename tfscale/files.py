"""How tfscale writes files: whole or not at all, with the rights that the user's umask gives.

Files and folders of the cache are the exception: they are private, whatever the umask.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


@contextlib.contextmanager
def replacing(path: Path, private: bool = False) -> Iterator[Path]:
    """A name beside ``path`` for a new file, which takes its place at the end if nothing failed.

    It ends as ``path`` does, for programs that look at endings. A private file is there from the
    start, empty, so that nobody else can open it before it is written.

    Example:
        >>> with replacing(Path("losses.json")) as fresh:
        ...     _ = fresh.write_text("[]")
    """
    fresh = path.with_name(f".{secrets.token_hex(6)}.{path.name}")
    try:
        if private:
            os.close(private_opener(str(fresh), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        yield fresh
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def private_opener(path: str, flags: int) -> int:
    """Open a file as ``open(..., opener=private_opener)`` does: new files are the user's alone."""
    return os.open(path, flags, PRIVATE_FILE)


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, which nobody else may enter."""
    if folder.is_dir():
        return
    make_private_folder(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process is as quick; or it is a file
        folder.mkdir(PRIVATE_FOLDER)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
