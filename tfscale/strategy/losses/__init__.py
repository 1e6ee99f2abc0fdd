"""Losses of a replica as parts of the loss of the whole batch."""
