"""The result of a check, with advice."""

from __future__ import annotations

import dataclasses

OK = "ok"
WARNING = "warning"  # training works, but not as well as it could
PROBLEM = "problem"  # training would fail


@dataclasses.dataclass(frozen=True)
class Check:
    """One entry of the report.

    Args:
        name: name of the checked thing.
        state: ``OK``, ``WARNING`` or ``PROBLEM``.
        found: what the check found.
        advice: what to do; empty if nothing is wrong.
    """

    name: str
    state: str
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(name, OK, found)


def warning(name: str, found: str, advice: str) -> Check:
    """Return a check that found a risk, with advice."""
    return Check(name, WARNING, found, advice)


def problem(name: str, found: str, advice: str) -> Check:
    """Return a check that found something that does not work, with advice."""
    return Check(name, PROBLEM, found, advice)


def of_error(name: str, error: Exception) -> Check:
    """Return a check from an error of several lines.

    The first line says what is wrong, indented lines give details, and the other lines are advice,
    as in errors of the build.
    """
    first, *rest = str(error).splitlines()
    details = 0
    while details < len(rest) and rest[details].startswith(" "):
        details += 1
    return problem(name, "\n".join([first, *rest[:details]]), "\n".join(rest[details:]))
