"""Checks of the compiler, the cache and the native library."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from tfscale.native import build, toolchain, trust
from tfscale.native.toolchain import LIBRARY, BuildError, TensorFlow
from tfscale.tools.doctor.check import Check, of_error, ok, problem, warning


def is_there(tf: TensorFlow) -> bool:
    """Return whether the library exists, so that no compiler is needed."""
    with contextlib.suppress(BuildError, OSError):  # ``library`` reports these errors
        return build.ready_made() is not None or build.existing_library(tf) is not None
    return False


def compiler(needed: bool) -> Check:
    """Check for a C++ compiler, which only a build needs."""
    try:
        return ok("compiler", str(toolchain.find_compiler()))
    except BuildError as error:
        if needed:
            return of_error("compiler", error)
        return ok("compiler", "none that works, and none is needed: the library is built")


def cache(needed: bool) -> Check:
    """Check the cache folder; ``needed`` says that the library must be built there."""
    folder = build.cache_folder()
    wrong = _wrong_with(folder)
    if not wrong:
        return ok("cache", str(folder))
    if not needed:
        return warning(
            "cache",
            f"{folder} {wrong}; the library does not need it, but every start measures the links",
            "Set TFSCALE_CACHE to a folder of your own that can be written.",
        )
    return problem(
        "cache",
        f"{folder} {wrong}",
        "Set TFSCALE_CACHE to a folder of your own that can be written; or set TFSCALE_LIBRARY to "
        "a library that `tfscale build --out DIR` has made elsewhere.",
    )


def _wrong_with(folder: Path) -> str:
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        # Try to write, since permissions say little: root has them all, and a file system may be
        # read-only.
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    reason = trust.doubt_of_folders(existing.resolve())
    return f"cannot be trusted: {reason}" if reason else ""


def library(tf: TensorFlow, *, may_build: bool) -> Check:
    """Check the library, and build it first if it is missing and ``may_build`` allows it."""
    try:
        if may_build and not is_there(tf):
            build.find_or_build(tf=tf)
        if ready := build.ready_made():
            build.check_fits(ready, build.make_tag(tf, toolchain.find_sources()))
            return ok("library", f"{_described(ready)}, built ahead, fits")
        if found := build.existing_library(tf):
            return ok("library", f"{_described(found)}, fits")
    except BuildError as error:
        return of_error("library", error)
    except OSError as error:  # folders of another user
        return problem("library", str(error), "See what to do about the cache.")
    return ok("library", f"not built yet{_stale()}; the first use or `tfscale build` builds it")


def _described(path: Path) -> str:
    tag = build.read_tag(path) or {}
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    cache = build.cache_folder()
    where = f"{path.relative_to(cache)} in the cache" if cache in path.parents else path
    return f"{where}, built {when} for TensorFlow {tag.get('tensorflow', '?')}"


def _stale() -> str:
    there = list(build.cache_folder().glob(f"tensorflow-*/{LIBRARY}"))
    if not there:
        return ""
    newest = max(there, key=lambda path: path.stat().st_mtime)
    return f" for this TensorFlow and tfscale (stale: {_described(newest)})"
