"""Recomputation of parts of the forward pass, instead of keeping them for the backward pass.

``trace`` (run.py) returns a step (step.py) of a model, ``plan_*`` (plan.py) choose the parts to
compute again, ``recomputing`` (run.py) trains by the plan. See docs/recompute.md.
"""

from tfscale.training.recompute.plan import (
    BudgetError,
    Plan,
    plan_budget,
    plan_fraction,
    plan_layers,
    plan_sqrt,
)
from tfscale.training.recompute.run import recomputing, trace

__all__ = [
    "BudgetError",
    "Plan",
    "plan_budget",
    "plan_fraction",
    "plan_layers",
    "plan_sqrt",
    "recomputing",
    "trace",
]
