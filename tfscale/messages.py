"""Messages while a program runs: through Python's logging, to the logger ``tfscale``.

Commands print, and so does a callback whose ``verbose`` asks for it; ``warnings`` are not used. A
program that has set up logging gets the messages through its own handlers. Otherwise they go to
stderr: ``logging.getLogger("tfscale").setLevel("WARNING")`` shows only warnings, ``"ERROR"``
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import sys


class _Stderr(logging.Handler):
    """A handler that writes messages to stderr if the program has no handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        word = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        with contextlib.suppress(OSError, ValueError):  # stderr is closed: the program continues
            # Write once: unbuffered, print would write the line's end after other processes'
            # output.
            sys.stderr.write(f"tfscale: {word}{record.getMessage()}\n")
            sys.stderr.flush()


def set_up() -> None:
    """Set up the logger; called once, when the package is imported."""
    logger = logging.getLogger("tfscale")
    if logger.level == logging.NOTSET:  # otherwise the program has chosen a level
        logger.setLevel(logging.INFO)
    logger.addHandler(_Stderr())
