"""Pipelines: replicas hold stages of one model, and take microbatches in turns."""
