"""``tfscale launch``: starts workers on this host or on several, and ends them together.

``LocalWorkers`` starts workers on this machine, for tests, benchmarks and demos.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfscale.cluster import JoinError
from tfscale.tools.launch.local import LocalWorkers, WorkerFailed

__all__ = ["JoinError", "LocalWorkers", "WorkerFailed"]


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    from tfscale.tools.launch import command

    return command.main(argv)
