"""Plan how to cut a model on a cluster: prices of data, model, domain and pipeline parallelism.

Example:
    >>> from tfscale import plan
    >>> units = plan.transformer(blocks=8, hidden=512, heads=8, sequence=256, vocabulary=8000)
    >>> found = plan.best(units, batch=64, cluster="4 x (2 devices, 16GB, 10TFLOPS), 10gbit")
    >>> print(found.cut)
    data 2, stages 4, zero bubble, 32 microbatches
"""

from __future__ import annotations

from tfscale.plan import pipelines
from tfscale.plan.cluster import Cluster, Host, Racks
from tfscale.plan.cut import Cut, Price
from tfscale.plan.formulas.state import Numbers
from tfscale.plan.measure import Measured, measured
from tfscale.plan.plan import Plan, best
from tfscale.plan.read import read
from tfscale.plan.scaling import Point, curve
from tfscale.plan.search import Found, MemoryLimitError
from tfscale.plan.units import Unit, transformer

__all__ = [
    "Cluster",
    "Cut",
    "Found",
    "Host",
    "Measured",
    "MemoryLimitError",
    "Numbers",
    "Plan",
    "Point",
    "Price",
    "Racks",
    "Unit",
    "best",
    "curve",
    "measured",
    "pipelines",
    "read",
    "transformer",
]
