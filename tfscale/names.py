"""Names that users give, and the error for one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is not among the known ones."""
    known = list(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"no {kind} is called {name!r}; known are {', '.join(known)}.{hint}")
