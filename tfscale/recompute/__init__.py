"""Computing parts of the forward pass again, instead of keeping them for the backward pass.

``trace`` (run.py) gives a step (step.py) of a model, ``plan_*`` (plan.py) choose what to
compute again, ``recomputing`` (run.py) trains by the plan. See docs/recompute.md.
"""

from tfscale.recompute.plan import (
    BudgetError,
    Plan,
    plan_budget,
    plan_fraction,
    plan_layers,
    plan_sqrt,
)
from tfscale.recompute.run import recomputing, trace

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
