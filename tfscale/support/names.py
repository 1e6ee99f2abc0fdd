"""Errors for unknown names that users give."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence

# Names the file that ``tfscale launch --timeline`` asks each worker for.
TIMELINE_VARIABLE = "TFSCALE_TIMELINE"


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """Return the error for a name that is not among the known ones."""
    known = list(known)
    hint = guess(name, known)
    words = f"no {kind} is called {name!r}; known are {', '.join(known)}."
    return ValueError(f"{words} {hint}" if hint else words)


def guess(name: object, known: Iterable[str]) -> str:
    """Return the question whether a known name was meant; empty if none is similar."""
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def check_command(program: str, words: Sequence[str], known: Iterable[str]) -> None:
    """End the process if its first word is neither an option nor a known command.

    Args:
        program: how the user called it, such as ``"tfscale bench"``.
        words: what follows on the command line.
        known: names of commands.
    """
    known = list(known)
    if not words or words[0].startswith("-") or words[0] in known:
        return
    print(f"{program}: error: {unknown('command', words[0], known)}", file=sys.stderr)
    print(f"`{program} --help` says what each of them does.", file=sys.stderr)
    raise SystemExit(2)
