"""The `tfscale` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tfscale.support.names import check_command
from tfscale.support.version import __version__

# Commands in separate modules: the main(argv) of each parses the rest of the command line.
_MODULES = {
    "demo": "train on one device and on four replicas of this machine, and draw the results",
    "launch": "start a training on several devices, of this host or of several",
    "bench": "measure all-reduces and optimizers, and how models learn with each",
    "memory": "say how much memory a training takes on each replica, before it trains",
    "plan": "say how a model should be cut on a cluster, and how far it scales",
    "doctor": "say what training needs here, what is missing, and what to do about it",
}
COMMANDS = ("build", *_MODULES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the process's exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not words:
        _parser().print_help()
        return 0
    check_command("tfscale", words, COMMANDS)
    if words[0] in _MODULES:
        command: Callable[[], int] = lambda: _run_module(words[0], words[1:])  # noqa: E731
    else:
        arguments = _parser().parse_args(words)
        command = lambda: arguments.run(arguments)  # noqa: E731

    from tfscale.native.toolchain import BuildError

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
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="build the native library ahead of its first use")
    build.add_argument(
        "--out", type=Path, metavar="DIR", help="also copy the library to DIR, for other machines"
    )
    build.set_defaults(run=_build)

    for name, text in _MODULES.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _run_module(name: str, argv: Sequence[str]) -> int:
    result = importlib.import_module(f"tfscale.tools.{name}").main(argv)
    return int(result or 0)


def _build(arguments: argparse.Namespace) -> int:
    from tfscale.native import build

    library = build.build(arguments.out)
    print(library)
    if arguments.out:
        print(f"To use it elsewhere: export TFSCALE_LIBRARY={library}", file=sys.stderr)
    return 0
