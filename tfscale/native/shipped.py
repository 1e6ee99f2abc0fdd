"""Names the places of the libraries that a wheel may hold, one for each of some TensorFlows.

``setup.py`` puts them there if ``TFSCALE_WHEEL_LIBRARIES`` asks for it.
"""

from __future__ import annotations

from pathlib import Path

from tfscale.native.toolchain import LIBRARY, PACKAGE

_PREFIX = "tensorflow-"


def place(version: str, package: Path | None = None) -> Path:
    """Return where the package keeps its library for exactly this version of TensorFlow."""
    return _folder(package) / f"{_PREFIX}{version}" / LIBRARY


def versions(package: Path | None = None) -> list[str]:
    """Return the versions of TensorFlow for which the package has a library."""
    places = _folder(package).glob(f"{_PREFIX}*/{LIBRARY}")
    return sorted(path.parent.name.removeprefix(_PREFIX) for path in places)


def _folder(package: Path | None) -> Path:
    return (package or PACKAGE) / "libraries"
