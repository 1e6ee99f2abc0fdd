"""``tfscale launch``: starts workers on this host or on several, and ends them together."""

from tfscale.launcher.command import main

__all__ = ["main"]
