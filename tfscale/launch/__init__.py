"""Workers on this machine, for tests, benchmarks and demos; and how workers meet."""

from tfscale.launch.local import LocalWorkers, WorkerFailed
from tfscale.launch.meeting import JoinError

__all__ = ["JoinError", "LocalWorkers", "WorkerFailed"]
