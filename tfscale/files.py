"""How tfscale writes files: whole or not at all, with the rights that the user's umask gives."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a new file, which takes its place at the end if nothing failed.

    It ends as ``path`` does, for programs that look at endings.

    Example:
        >>> with replacing(Path("losses.json")) as fresh:
        ...     _ = fresh.write_text("[]")
    """
    fresh = path.with_name(f".{secrets.token_hex(6)}.{path.name}")
    try:
        yield fresh
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
