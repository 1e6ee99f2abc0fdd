"""Divides the C++ sources into units, each of which one call of the compiler compiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tfscale.native.toolchain import Sources

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
OF_TENSORFLOW = ("tensorflow/", "tsl/", "xla/", "absl/")
_TOGETHER = "tensorflow.cc"


@dataclass(frozen=True)
class Unit:
    """Files that one call of the compiler compiles.

    Attributes:
        name: path of the file that the compiler gets, relative to the sources' root.
        files: the ``.cc`` files that the unit contains.
        headers: the headers of tfscale that these files include, directly or indirectly.
        uses_tensorflow: whether the unit includes headers of TensorFlow.
    """

    name: str
    files: tuple[str, ...]
    headers: tuple[str, ...]
    uses_tensorflow: bool

    def text(self) -> str | None:
        """Return the content of the file ``name`` if the build has to write that file."""
        if self.files == (self.name,):
            return None
        return "".join(f'#include "{file}"\n' for file in self.files)

    def __str__(self) -> str:
        return self.name if self.text() is None else "the files that include TensorFlow"


def find_units(sources: Sources) -> list[Unit]:
    """Return all units, the slowest first.

    TensorFlow's headers take the compiler about five seconds, and each of our files half a second.
    So all files that include TensorFlow form one unit. Even after an edit of one file, compiling
    all of them takes hardly longer than compiling that file.
    """
    alone: list[Unit] = []
    together: list[Unit] = []
    for file in sources.units:
        unit = _unit_of(file, sources)
        (together if unit.uses_tensorflow else alone).append(unit)
    if together:
        headers = sorted({header for unit in together for header in unit.headers})
        files = tuple(unit.name for unit in together)
        alone.insert(0, Unit(_TOGETHER, files, tuple(headers), uses_tensorflow=True))
    return alone


def _unit_of(file: str, sources: Sources) -> Unit:
    known = {*sources.units, *sources.headers}
    found: set[str] = set()
    uses_tensorflow = False
    pending = [file]
    while pending:
        current = pending.pop()
        for name in _INCLUDE.findall((sources.root / current).read_text(errors="replace")):
            uses_tensorflow |= name.startswith(OF_TENSORFLOW)
            beside = str(PurePosixPath(current).parent / name)
            included = {name, beside} & known - found
            found |= included
            pending += included
    return Unit(file, (file,), tuple(sorted(found)), uses_tensorflow)


def write_generated(units: list[Unit], root: Path) -> None:
    """Write the files of units that join several files of the sources."""
    for unit in units:
        if (text := unit.text()) is not None:
            (root / unit.name).write_text(text)
