"""``tfscale bench checkmate``: how large batches become with optimal recomputation.

The figures compare with those that Checkmate published (Jain et al., MLSys 2020, figure 5), in the
model of its paper: a number takes 4 bytes, parameters count twice, the memory is 16 GB, and
recomputation may cost at most one more forward pass. The nets are built, and nothing is trained.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfscale.tools.bench import machine
from tfscale.tools.bench.checkmate_nets import NETS, graph_of_layers
from tfscale.tools.bench.command import bench_parser, list_of, make_console, one_of
from tfscale.training.recompute.bound import lower_bound
from tfscale.training.recompute.graph import Graph, check
from tfscale.training.recompute.optimum import Optimum, optimum

MEMORY = 16e9
PUBLISHED = {
    "VGG19": 289,
    "U-Net": 57,
    "ResNet50": 193,
    "MobileNet": 1105,
    "FCN8": 60,
    "SegNet": 62,
}


@dataclass(frozen=True)
class Largest:
    """The largest batch that was found.

    Args:
        batch: the batch; 0 if none was found.
        bound: proven bound of the batch, as a fraction, since Checkmate's figures are rounded.
        best: the order for the batch.
        seconds: time of the search.
    """

    batch: int
    bound: float
    best: Optimum | None
    seconds: float


def largest_batch(graph: Callable[[float], Graph], seconds: float, solver: str) -> Largest:
    """Return the largest batch with which a net fits into the memory.

    Args:
        graph: returns the graph of the net for a batch.
        seconds: time limit. Half of it is for the first large batch that is tried.
        solver: the solver.
    """
    began = time.monotonic()

    def fits(batch: int) -> Optimum | None:
        one = graph(batch)
        left = seconds - (time.monotonic() - began)
        found = optimum(one, MEMORY, solver=solver, seconds=max(1.0, left / 4))
        if found is None or found.cost > forward_cost(one):
            return None
        check(one, found.order, MEMORY)
        return found

    bound = _last(lambda batch: lower_bound(graph(batch), MEMORY) <= forward_cost(graph(batch)))
    low, high, best = 0, int(bound) + 1, None
    middle = int(bound)
    while low + 1 < high:
        found = fits(middle)
        if found is None:
            high = middle
        else:
            low, best = middle, found
        middle = (low + high) // 2
    return Largest(low, bound, best, time.monotonic() - began)


def forward_cost(graph: Graph) -> float:
    """Return the cost of one forward pass."""
    return sum(node.cost for node in graph.nodes[: graph.first_again])


def _last(holds: Callable[[float], bool]) -> float:
    """Return the last number for which a condition holds that holds up to some number."""
    high = 1.0
    while holds(high):
        high *= 2
    low = high / 2
    while low + 0.01 < high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench checkmate``; return the exit status."""
    parser = bench_parser(
        "checkmate", "Find the largest batches that fit into 16 GB with optimal recomputation."
    )
    add = parser.add_argument
    add("--nets", type=list_of(one_of(NETS)), default=",".join(NETS), metavar="NAME,...",
        help="nets (default: %(default)s)")  # fmt: skip
    add("--seconds", type=float, default=600.0, metavar="S",
        help="time limit for each net (default: %(default)s)")  # fmt: skip
    add("--solver", default="auto", choices=("auto", "search", "integer", "rounded"),
        help="the solver (default: %(default)s)")  # fmt: skip
    arguments = parser.parse_args(argv)
    import keras

    about = machine.describe()
    console = make_console()
    missed = False
    for name in arguments.nets:
        model = NETS[name](keras)
        found = largest_batch(
            lambda batch, model=model: graph_of_layers(model, batch),  # type: ignore[misc]
            arguments.seconds,
            arguments.solver,
        )
        missed = missed or found.batch < min(PUBLISHED[name], int(found.bound))
        console.print(_line(name, found))
    console.print(machine.signature(about, "checkmate", argv))
    if missed:
        print("tfscale bench: a batch is smaller than Checkmate's", file=sys.stderr)
    return int(missed)


def _line(name: str, found: Largest) -> str:
    again = (
        f", and its recomputation at most {found.best.gap:.0%} too expensive" if found.best else ""
    )
    return (
        f"{name}: batch {found.batch}, Checkmate's {PUBLISHED[name]}. No batch above "
        f"{found.bound:.2f} fits{again}; {found.seconds:.0f} s"
    )
