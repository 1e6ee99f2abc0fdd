"""What tfscale says while a program runs: by Python's logging, to the logger ``tfscale``.

Commands print, and so does a callback whose ``verbose`` asks for it; ``warnings`` are not used.
A program that has set up logging gets the messages by its own handlers. Until it has, they go to
stderr: ``logging.getLogger("tfscale").setLevel("WARNING")`` leaves warnings alone, ``"ERROR"``
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import sys


class _Stderr(logging.Handler):
    """Writes what nobody else would show."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        word = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        with contextlib.suppress(OSError, ValueError):  # stderr is closed: the program goes on
            # In one piece: unbuffered, print writes the line's end after what others write.
            sys.stderr.write(f"tfscale: {word}{record.getMessage()}\n")
            sys.stderr.flush()


def set_up() -> None:
    """Called once, when the package is imported."""
    logger = logging.getLogger("tfscale")
    if logger.level == logging.NOTSET:  # otherwise the program has said how much it wants to hear
        logger.setLevel(logging.INFO)
    logger.addHandler(_Stderr())
