"""Pipelines as data: build, verify, simulate and draw the order of a pipeline's work.

Example:
    >>> from tfscale.plan import pipelines
    >>> order = pipelines.one_f_one_b(stages=4, microbatches=8)
    >>> order.verify().live
    (4, 3, 2, 1)
    >>> pipelines.simulate(order, pipelines.Times(forward=1, backward_input=1)).bubble
    9
"""

from __future__ import annotations

from tfscale.plan.pipelines.bidirectional import chimera, dualpipe
from tfscale.plan.pipelines.draw import draw
from tfscale.plan.pipelines.order import PipelineOrder, Transfer
from tfscale.plan.pipelines.orders import (
    gpipe,
    interleaved,
    interleaved_steps,
    one_f_one_b,
    zero_bubble,
)
from tfscale.plan.pipelines.simulate import Box, Simulation, Times, simulate
from tfscale.plan.pipelines.turns import OrderError, Turn, Work
from tfscale.plan.pipelines.verify import Count, verify

__all__ = [
    "Box",
    "Count",
    "OrderError",
    "PipelineOrder",
    "Simulation",
    "Times",
    "Transfer",
    "Turn",
    "Work",
    "chimera",
    "draw",
    "dualpipe",
    "gpipe",
    "interleaved",
    "interleaved_steps",
    "one_f_one_b",
    "simulate",
    "verify",
    "zero_bubble",
]
