"""How a worker finds the others: the launcher's variables, addresses, and the meeting of all."""

from tfscale.cluster.meeting import JoinError

__all__ = ["JoinError"]
