"""``tfscale bench``: how long all-reduces take, and how long they should.

The parent process (``run``) starts one set of workers for each number of processes.
The workers (``worker``) measure all contestants in turn, again and again, so that a
machine that changes its speed changes it for all. See docs/benchmarks.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

_WITH_OPTIONS_OF_THEIR_OWN = (
    "devices", "fit", "convergence", "optimizers", "learning", "memory", "telemetry",
    "epochs", "curvature", "adaptive", "products", "rules",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    if argv and argv[0] in _WITH_OPTIONS_OF_THEIR_OWN:
        return int(importlib.import_module(f"tfscale.bench.{argv[0]}").main(argv[1:]))
    from tfscale.bench import command

    return command.main(argv)
