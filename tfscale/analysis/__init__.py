"""Measurements of a model's curvature, and of the time and the bytes of a training."""
