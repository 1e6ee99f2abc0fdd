"""Writing of files: whole or not at all, with the permissions of the user's umask.

Files and folders of the cache are an exception: they are private, whatever the umask.
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
    """Yield a name for a new file, which replaces ``path`` at the end if nothing failed.

    The name has the same ending as ``path``, for programs that look at endings. A private file
    exists from the start, empty, so that nobody else can open it before it is written.

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
    """Open a file; only the user can read a new one: ``open(..., opener=private_opener)``."""
    return os.open(path, flags, PRIVATE_FILE)


def make_private_folder(folder: Path) -> None:
    """Make a folder that nobody else may enter, with all missing folders above it."""
    if folder.is_dir():
        return
    make_private_folder(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster; or it is a file
        folder.mkdir(PRIVATE_FOLDER)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
