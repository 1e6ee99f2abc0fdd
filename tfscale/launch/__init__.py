"""Starting workers: on this machine, for tests, benchmarks and demos."""

from tfscale.launch.local import LocalWorkers, WorkerFailed

__all__ = ["LocalWorkers", "WorkerFailed"]
