"""Search of a worker for the others: launchers' variables, addresses, and their meeting."""

from tfscale.cluster.gathering import JoinError

__all__ = ["JoinError"]
