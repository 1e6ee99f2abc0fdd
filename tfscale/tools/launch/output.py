"""The output of workers, line by line with their ranks, and their progress bars."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TextIO

from tfscale.tools.launch.writer import Pieces, write_at_once

_COLOURS = (36, 33, 32, 35, 34, 31)  # codes of ANSI terminals
_KEPT = 20  # lines that are kept of each worker
_LONGEST = 1 << 20  # largest number of characters that wait for the end of their line
_BEGINS = "tfscale launch began again:"
_HEADER = re.compile(r"Epoch \d+/\d+")
# TensorFlow 2.21 prints these while it is imported, whatever TF_CPP_MIN_LOG_LEVEL says.
_NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called.*"
    r"|I\d{4} [\d:.]+ +\d+ \S+\.cc:\d+\] .*"
)
_CLEAR = "\r\x1b[J"  # clears from here to the end of the screen


class Screen:
    """Workers' lines on standard output and standard error, as workers print them.

    A line that is drawn over itself (with carriage returns or backspaces) is a bar. The screen
    shows the bars of rank 0: on a terminal as they change and below all other lines, otherwise once
    they are complete. When the screen hides a bar, it also hides Keras's line "Epoch 1/4" above it.
    TensorFlow's informational log lines are hidden, unless ``TF_CPP_MIN_LOG_LEVEL`` is 0.

    Args:
        ranks: number of workers.
        prefix: whether lines begin with their ranks.
        all_bars: whether to show the bars of other ranks, too.
        out, err: streams; standard output and standard error by default.
        put: writes pieces; at once by default.
        colours, live: whether to use colours, and bars that change; by default on a terminal.
    """

    def __init__(
        self,
        ranks: int,
        *,
        prefix: bool = True,
        all_bars: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
        put: Callable[[Pieces], None] = write_at_once,
        colours: bool | None = None,
        live: bool | None = None,
    ) -> None:
        self.out, self.err = out or sys.stdout, err or sys.stderr
        terminal = self.out.isatty()
        self._put = put
        self._prefix = prefix
        self._shows_noise = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
        self._all_bars = all_bars
        coloured = terminal and not os.environ.get("NO_COLOR")
        self._colours = coloured if colours is None else colours
        self._live = terminal if live is None else live
        self._width = len(str(ranks - 1))
        self._begun: dict[tuple[int, TextIO], str] = {}  # lines without an end so far
        self._held: dict[tuple[int, TextIO], str] = {}  # "Epoch 1/4", until the next line comes
        self._drawn = 0  # number of drawn bars
        self._last: dict[int, collections.deque[str]] = {}

    def heard(self, rank: int, text: str, stream: TextIO) -> None:
        """Show text that a worker has printed."""
        *whole, rest = (self._begun.get((rank, stream), "") + text).split("\n")
        self._begun[rank, stream] = _kept(rest) if _is_bar(rest) else rest
        if len(rest) > _LONGEST:
            whole.append(self._begun.pop((rank, stream)))
        lines = [self._line(rank, line, stream) for line in whole]
        self._write("".join(lines), stream)

    def ended(self, rank: int) -> None:
        """Show the rest of a worker's output, after its end."""
        for stream in (self.out, self.err):
            if self._begun.get((rank, stream), "").strip():
                self.heard(rank, "\n", stream)
            if held := self._held.pop((rank, stream), ""):
                self._write(self._shown(rank, held), stream)

    def say(self, text: str) -> None:
        """Show a message of the launcher itself."""
        self._write(f"tfscale launch: {text}\n", self.err)

    def last(self, rank: int) -> Sequence[str]:
        """Return a worker's last lines."""
        return list(self._last.get(rank, ()))

    def _write(self, text: str, stream: TextIO) -> None:
        """Write text above the bars."""
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        clear = up + _CLEAR if self._drawn else ""
        bars = self._bars() if self._live else []
        self._drawn = len(bars)
        pieces = [(self.out, clear), (stream, text), (self.out, "\n".join(bars))]
        self._put([(each, text) for each, text in pieces if text])

    def _line(self, rank: int, line: str, stream: TextIO) -> str:
        line = line.rstrip("\r")  # the line end of Windows
        text = _visible(line)
        if _NOISE.fullmatch(text) and not self._shows_noise:
            return ""
        if self._shows_bars_of(rank):
            return self._shown(rank, text)
        held = self._held.pop((rank, stream), "")
        if _is_bar(line):
            return ""
        before = self._shown(rank, held) if held else ""
        if _HEADER.fullmatch(text):
            self._held[rank, stream] = text
            return before
        return before + self._shown(rank, text)

    def _shown(self, rank: int, text: str) -> str:
        self._last.setdefault(rank, collections.deque(maxlen=_KEPT)).append(text)
        return f"{self._begin(rank)}{text}\n"

    def _begin(self, rank: int) -> str:
        if not self._prefix:
            return ""
        text = f"[{rank:{self._width}}]"
        return (
            f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if self._colours else text + " "
        )

    def _shows_bars_of(self, rank: int) -> bool:
        return rank == 0 or self._all_bars

    def _bars(self) -> list[str]:
        room = shutil.get_terminal_size().columns - 1 - (self._width + 3 if self._prefix else 0)
        return [
            self._begin(rank) + _clipped(_visible(text), max(1, room))
            for (rank, _), text in sorted(self._begun.items(), key=lambda item: item[0][0])
            if _is_bar(text) and self._shows_bars_of(rank)
        ]


def _is_bar(line: str) -> bool:
    return "\r" in line or "\b" in line


def _visible(line: str) -> str:
    """Return the visible text of a line that was drawn over itself."""
    drawn = [part for part in line.split("\r") if part.strip("\b ")]
    return _overwritten(drawn[-1])[0].rstrip() if drawn else ""


def _kept(line: str) -> str:
    """Return an incomplete bar without the text that was drawn over."""
    text, place = _overwritten(line.rstrip("\r").rpartition("\r")[2])
    if not text.strip():  # Keras moves back by backspaces, and then by a carriage return
        text, place = _visible(line), 0
    back = "\r" if line.endswith("\r") or place == 0 else "\b" * (len(text) - place)
    return "\r" + text + back


def _overwritten(text: str) -> tuple[str, int]:
    """Return the text after backspaces, and the place of the next character."""
    if "\b" not in text:
        return text, len(text)
    shown: list[str] = []
    place = 0
    for character in text:
        if character == "\b":
            place = max(0, place - 1)
        else:
            shown[place : place + 1] = [character]
            place += 1
    return "".join(shown), place


def _clipped(text: str, room: int) -> str:
    """Return the first ``room`` characters of a text; colour codes take no room."""
    parts = re.split(r"(\x1b\[[0-9;]*m)", text)
    for at in range(0, len(parts), 2):
        parts[at], room = parts[at][:room], max(0, room - len(parts[at]))
    return "".join(parts)


class Logs:
    """A log file for each worker; no files if ``folder`` is None.

    Files of an earlier launch stay; a line separates the new output, with the time of its start.
    Training does not depend on the files: with a full disk the rest is lost, and a message says so
    once.
    """

    def __init__(self, folder: Path | None, screen: Screen) -> None:
        self._folder = folder
        self._screen = screen
        self._files: dict[int, IO[str]] = {}

    def heard(self, rank: int, text: str) -> None:
        """Add a worker's output to its log file."""
        if self._folder is None:
            return
        try:
            if rank not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"worker-{rank}.log"
                self._files[rank] = path.open("a", errors="replace", newline="")
                if self._files[rank].tell():
                    self._files[rank].write(f"\n--- {_BEGINS} {time.strftime('%F %T')}\n")
            self._files[rank].write(text)
            self._files[rank].flush()
        except OSError as error:
            self._screen.say(
                f"{self._folder} cannot be written ({error.strerror}): training goes on, and what "
                "workers print from now on is not kept"
            )
            self._folder = None

    def close(self) -> None:
        """Close all log files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
