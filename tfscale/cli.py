"""The `tfscale` command."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from tfscale.version import __version__

if TYPE_CHECKING:
    from tfscale.ops.toolchain import Sources

# Commands with a module of their own: its main(argv) reads the rest of the command line.
_MODULES = {
    "demo": "train on one device and on four replicas of this machine, and draw the results",
    "launch": "start a training on several devices, of this host or of several",
    "bench": "measure all-reduces and optimizers, and how models learn with each",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the process's exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if words and words[0] in _MODULES:
        command: Callable[[], int] = lambda: _run_module(words[0], words[1:])  # noqa: E731
    else:
        arguments = _parser().parse_args(words)
        command = lambda: arguments.run(arguments)  # noqa: E731

    from tfscale.ops.toolchain import BuildError

    try:
        return command()
    except BuildError as error:
        print(f"tfscale: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tfscale: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfscale", description="Keras training on many devices.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tfscale {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="build the native library ahead of its first use")
    build.add_argument(
        "--out", type=Path, metavar="DIR", help="also copy the library to DIR, for other machines"
    )
    build.set_defaults(run=_build)

    doctor = commands.add_parser("doctor", help="say what is installed, and what is missing")
    doctor.set_defaults(run=_doctor)

    for name, text in _MODULES.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _run_module(name: str, argv: Sequence[str]) -> int:
    module = {"launch": "launcher"}.get(name, name)
    result = importlib.import_module(f"tfscale.{module}").main(argv)
    return int(result or 0)


def _build(arguments: argparse.Namespace) -> int:
    from tfscale.ops import build

    library = build.build(arguments.out)
    print(library)
    if arguments.out:
        print(f"To use it elsewhere: export TFSCALE_LIBRARY={library}", file=sys.stderr)
    return 0


# ----------------------------------------------------------------------- doctor


def _doctor(_: argparse.Namespace) -> int:
    """Prints one line per thing; the status is 1 when the library could not be used or built."""
    from tfscale.ops import build, toolchain

    healthy = True

    def line(name: str, value: Callable[[], str], needed: bool = False) -> None:
        nonlocal healthy
        try:
            text = value()
        except toolchain.BuildError as error:
            text = "PROBLEM: " + str(error).replace("\n", "\n" + " " * 14)
            healthy = healthy and not needed
        print(f"{name:12}  {text}")

    line("tfscale", lambda: f"{__version__} in {toolchain.PACKAGE}")
    line("Python", lambda: f"{platform.python_version()} ({sys.executable})")
    line("machine", _machine)
    line("TensorFlow", _tensorflow, needed=True)
    line("NumPy", lambda: _version_of("numpy"))
    line("Keras", lambda: _version_of("keras"))
    line("sources", lambda: _sources(toolchain.find_sources()))
    line("compiler", lambda: str(toolchain.find_compiler()))
    line("cache", lambda: _cache(build.cache_folder()))
    if healthy:
        line("library", _library, needed=True)
    return 0 if healthy else 1


def _machine() -> str:
    return (
        f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} processors, "
        f"vectors: {' '.join(_vector_sets()) or 'unknown'}"
    )


def _vector_sets() -> list[str]:
    known = ("sse2", "f16c", "avx2", "avx512f", "asimd", "sve")
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return [name for name in known if name in words]


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _tensorflow() -> str:
    from tfscale.ops import toolchain

    return str(toolchain.find_tensorflow())


def _sources(sources: Sources) -> str:
    return f"{len(sources.units)} files in {sources.root / 'custom_ops'}"


def _cache(folder: Path) -> str:
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    return f"{folder} ({'can' if os.access(existing, os.W_OK) else 'CANNOT'} be written)"


def _library() -> str:
    from tfscale.ops import build, toolchain

    tf = toolchain.find_tensorflow()
    if ready := build.ready_made():
        build.check_fits(ready, build.make_tag(tf, toolchain.find_sources()))
        return f"{ready}, built ahead, fits"
    if cached := build.cached_library(tf):
        return f"{cached}, fits"
    toolchain.find_compiler()
    return "not built yet: the first use or `tfscale build` builds it"
