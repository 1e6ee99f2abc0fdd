"""Recomputation of parts of the forward pass, instead of keeping them for the backward pass.

``trace`` (run.py) returns a step (traced_step.py) of a model. ``plan_budget`` (budget.py) and the
others choose the parts to compute again: segments (solve.py), or single results (optimum.py), which
are the nodes of a graph (graph.py, results.py). ``recomputing`` (run.py) trains by the plan. See
docs/recompute.md.
"""

from tfscale.training.recompute.budget import BudgetError, plan_budget, plan_fraction
from tfscale.training.recompute.phases import PhasedPlan
from tfscale.training.recompute.plan import Plan
from tfscale.training.recompute.planners import load_plan, plan_layers, plan_sqrt
from tfscale.training.recompute.run import recomputing, trace

__all__ = [
    "BudgetError",
    "PhasedPlan",
    "Plan",
    "load_plan",
    "plan_budget",
    "plan_fraction",
    "plan_layers",
    "plan_sqrt",
    "recomputing",
    "trace",
]
