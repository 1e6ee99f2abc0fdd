"""What a check finds, and what to do about it."""

from __future__ import annotations

import dataclasses

OK = "ok"
WARNING = "warning"  # training works, but not as well as it could
PROBLEM = "problem"  # training would fail


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report.

    Args:
        name: of the thing.
        state: ``OK``, ``WARNING`` or ``PROBLEM``.
        found: what there is.
        advice: what to do; empty where nothing is wrong.
    """

    name: str
    state: str
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name, OK, found)


def warning(name: str, found: str, advice: str) -> Check:
    """A check that found something that may go wrong, and what to do about it."""
    return Check(name, WARNING, found, advice)


def problem(name: str, found: str, advice: str) -> Check:
    """A check that found something that does not work, and what to do about it."""
    return Check(name, PROBLEM, found, advice)


def of_error(name: str, error: Exception) -> Check:
    """Of an error whose first line says what is wrong, lines set in which details, others what
    to do, as those of the build are.
    """
    first, *rest = str(error).splitlines()
    details = 0
    while details < len(rest) and rest[details].startswith(" "):
        details += 1
    return problem(name, "\n".join([first, *rest[:details]]), "\n".join(rest[details:]))
