"""What is sent of a gradient, and in which format. No TensorFlow here."""

from tfscale.compression.policy import DEFAULT_SENSITIVE, WirePolicy

__all__ = ["DEFAULT_SENSITIVE", "WirePolicy"]
