"""Classifiers for very many classes: MACH, which needs no communication.

- ``mach.py``: ``MACH``, what users call; ``fitting.py``: its ``fit``; ``history.py``: the result.
- ``ensemble.py``, ``heads.py``: the models, and the values that they give to buckets;
  ``tracing.py``: graphs of them.
- ``hashing.py``: from classes to buckets; ``labels.py``: from users' labels to classes.
- ``estimators.py``, ``search.py``: scores of classes, and the k best ones.
- ``data.py``, ``compiling.py``, ``losses.py``: data with buckets in place of labels; arguments of
  ``compile``; losses and metrics of several labels.
- ``files.py``: a folder of trained models; ``serving.py``: a SavedModel.
- ``metrics.py``, ``planner.py``, ``features.py``: precision and recall; B and R; hashed inputs.
"""

from tfscale.training.extreme.features import HashedFeatures
from tfscale.training.extreme.mach import MACH
from tfscale.training.extreme.metrics import propensities
from tfscale.training.extreme.planner import Plan, plan, repetitions_needed

__all__ = ["MACH", "HashedFeatures", "Plan", "plan", "propensities", "repetitions_needed"]
