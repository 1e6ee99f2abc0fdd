"""Grids of replicas: teams along the axes of a grid, and layers whose weights are in slices."""
