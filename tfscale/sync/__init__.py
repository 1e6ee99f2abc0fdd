"""Sync rules: replicas agree after every step, or after many steps."""

from tfscale.native import tensorflow_needed as _  # noqa: F401
from tfscale.sync.bounded_staleness import BoundedStaleness, stable_rate
from tfscale.sync.diloco import DiLoCo
from tfscale.sync.elastic import ElasticAveraging
from tfscale.sync.every_step import EveryStep
from tfscale.sync.gossip import Gossip
from tfscale.sync.hierarchical import Hierarchical
from tfscale.sync.local_sgd import LocalSGD
from tfscale.sync.period import Period
from tfscale.sync.rule import Round, Rule

__all__ = [
    "BoundedStaleness",
    "DiLoCo",
    "ElasticAveraging",
    "EveryStep",
    "Gossip",
    "Hierarchical",
    "LocalSGD",
    "Period",
    "Round",
    "Rule",
    "stable_rate",
]
