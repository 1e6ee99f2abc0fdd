"""``tfscale doctor``: checks what training needs here, and says what to do about problems."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from tfscale.bridge import hooks
from tfscale.tools.doctor import show
from tfscale.tools.doctor.check import PROBLEM
from tfscale.tools.doctor.checks import Checks, Wanted

SECONDS = 120.0


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if training would fail."""
    arguments = _parser().parse_args(argv)
    if arguments.hooks:
        return _list_hooks(arguments.json)
    checks = Checks(Wanted(arguments.quick, arguments.hosts, arguments.ssh, arguments.time_limit))
    console = show.make_console()
    found = []
    for check in checks:
        found.append(check)
        if not arguments.json:
            show.line(console, check)
    well = all(check.state != PROBLEM for check in found)
    if arguments.json:
        listed = [dataclasses.asdict(check) for check in found]
        print(json.dumps({"ok": well, "checks": listed, "all_reduce": checks.all_reduce}))
    else:
        show.verdict(console, found)
    return 0 if well else 1


def _list_hooks(as_json: bool) -> int:
    if as_json:
        print(json.dumps({"hooks": [dataclasses.asdict(hook) for hook in hooks.declared()]}))
    else:
        show.hooks(show.make_console(), hooks.declared())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfscale doctor",
        description="Say what training needs here, what is missing, and what to do about it.",
        epilog="The exit status is 1 if training would fail. See docs/doctor.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--quick", action="store_true", help="no all-reduce, and do not build the native library"
    )
    what.add_argument(
        "--hooks",
        action="store_true",
        help="only list what tfscale replaces in Keras and TensorFlow, until when and why",
    )
    what.add_argument(
        "--hosts",
        default="",
        metavar="HOST,...",
        help="all-reduce between these hosts, as `tfscale launch --hosts` takes them",
    )
    parser.add_argument(
        "--ssh",
        default="ssh",
        metavar="COMMAND",
        help="command that reaches --hosts, as `tfscale launch --ssh` takes it",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=SECONDS,
        metavar="SECONDS",
        help="for the all-reduce (default: %(default)s)",
    )
    return parser
