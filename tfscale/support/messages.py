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
from collections.abc import Callable

_CLEAR = "\r\x1b[K"  # the line that the cursor is in
_PARTS_IN_A_LOG = 4


class _Stderr(logging.Handler):
    """A handler that writes messages to stderr if the program has no handlers."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn = False  # whether the terminal's last line is one that ``draw`` has left there

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        word = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        self._write(f"tfscale: {word}{record.getMessage()}\n")
        self._drawn = False

    def draw(self, text: str) -> bool:
        """Draw a line that the next one replaces; return False where messages go elsewhere."""
        if not (_logger.isEnabledFor(logging.INFO) and self._is_terminal()):
            return False
        with self.lock or contextlib.nullcontext():
            self._write(f"tfscale: {text}")
            self._drawn = True
        return True

    def erase(self) -> None:
        """Remove the line that ``draw`` has left, if it is still there."""
        with self.lock or contextlib.nullcontext():
            if self._drawn:
                self._write("")
                self._drawn = False

    def _is_terminal(self) -> bool:
        with contextlib.suppress(AttributeError, ValueError):  # stderr is None, or closed
            return not logging.getLogger().handlers and sys.stderr.isatty()
        return False

    def _write(self, text: str) -> None:
        # The program continues if stderr is closed, or None.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            # Write once: unbuffered, print would write the line's end after other processes'
            # output.
            sys.stderr.write(_CLEAR + text if self._drawn else text)
            sys.stderr.flush()


_logger = logging.getLogger("tfscale")
_stderr = _Stderr()


def set_up() -> None:
    """Set up the logger; called once, when the package is imported."""
    if _logger.level == logging.NOTSET:  # otherwise the program has chosen a level
        _logger.setLevel(logging.INFO)
    _logger.addHandler(_stderr)


class Progress:
    """Says how much of a task is done while the ``with`` block runs.

    A terminal shows one line, which is drawn anew after each step. Everywhere else there are no
    more than three lines: a quarter, half and three quarters of the task are done.

    Args:
        what: a text with places for two numbers: ``"compiled {} of {} files"``.
        total: number of steps.
        say: takes the lines for a log.
    """

    def __init__(self, what: str, total: int, say: Callable[[str], None]) -> None:
        self._what = what
        self._total = total
        self._say = say
        self._done = 0

    def __enter__(self) -> Progress:
        _stderr.draw(self._text())
        return self

    def __exit__(self, *_: object) -> None:
        _stderr.erase()

    def advance(self, steps: int) -> None:
        """Note that more steps are done."""
        before = self._part()
        self._done += steps
        if not _stderr.draw(self._text()) and before < self._part() < _PARTS_IN_A_LOG:
            self._say(self._text())

    def _part(self) -> int:
        return _PARTS_IN_A_LOG * self._done // self._total

    def _text(self) -> str:
        return self._what.format(self._done, self._total)
