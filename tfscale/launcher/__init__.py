"""``tfscale launch``: starts workers on this host or on many, and ends them together."""

from tfscale.launcher.command import main

__all__ = ["main"]
