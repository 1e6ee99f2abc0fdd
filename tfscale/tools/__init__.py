"""The commands of ``tfscale``."""
