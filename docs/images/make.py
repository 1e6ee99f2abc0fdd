"""Draw the pictures of docs/, but for the demo's: ``python docs/images/make.py [NAME ...]``."""

from __future__ import annotations

import io
import pathlib
import sys

import house
import recompute
import waits
from matplotlib.figure import Figure
from PIL import Image

from tfscale import collectives
from tfscale.collectives import ALGORITHMS, Link
from tfscale.plan import pipelines
from tfscale.support import figures

HERE = pathlib.Path(__file__).parent
SMALL_BUFFER = Link(alpha=1.0, beta=0.1)  # all of it takes a tenth of an empty message
GIGABIT = Link(alpha=50e-6, beta=8e-9)
RANKS = 48


def of_the_document() -> collectives.Schedule:
    """Return the schedule that the first code of docs/custom-schedules.md makes."""
    text = (HERE.parent / "custom-schedules.md").read_text()
    namespace: dict[str, collectives.Schedule] = {}
    exec(text.split("```python")[1].split("```")[0], namespace)
    return namespace["mine"]


def on_small_buffers() -> tuple[Figure, Figure]:
    """Draw a ring and a tree on one scale of time."""
    both = [make(12).draw(SMALL_BUFFER) for make in (collectives.ring, collectives.tree)]
    end = max(figure.axes[0].get_xlim()[1] for figure in both)
    for figure in both:
        figure.axes[0].set_xlim(-0.02 * end, end)
        figure.axes[0].set_xlabel(
            "time (an empty message takes 1, the whole buffer 1 + 0.1)", fontsize=8
        )
    return both[0], both[1]


def crossover() -> Figure:
    """Draw how long each algorithm takes, by the size of the buffer."""
    figure = figures.figure(8.0, 4.0)
    axes = figure.add_subplot()
    sizes = [10 ** (exponent / 4) for exponent in range(8, 34)]
    names = {"central": "central", "tree": "tree", "ring": "ring, direct", "halving": "halving"}
    for name, label in names.items():
        cost = ALGORITHMS[name](RANKS).cost
        axes.loglog(sizes, [1e3 * cost.time(size, GIGABIT) for size in sizes], label=label)
    axes.set_xlabel("bytes of the buffer", fontsize=8)
    axes.set_ylabel("ms", fontsize=8)
    axes.set_title(f"{RANKS} ranks, 1 Gbit/s, 50 µs per message", loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def pictures() -> dict[str, Figure]:
    """Draw all pictures, by the names of their files."""
    small_ring, small_tree = on_small_buffers()
    schedules = {
        "ring": collectives.ring(4),
        "tree": collectives.tree(8),
        "halving": collectives.halving(8),
        "direct": collectives.direct(5),
        "hierarchical": collectives.hierarchical([4, 4]),
        "central": collectives.central(4),
        "mixture": collectives.mixtures("ring", 5)[0],
        "pairs": of_the_document(),
        "all-to-all": collectives.all_to_all(4),
    }
    drawn = {name: schedule.draw() for name, schedule in schedules.items()}
    return {
        **drawn,
        "small-ring": small_ring,
        "small-tree": small_tree,
        "crossover": crossover(),
        "rooms": house.draw_rooms(),
        "gradient": house.draw_gradient(),
        "pipeline": pipelines.one_f_one_b(stages=4, microbatches=8).draw(),
        "chimera": pipelines.chimera(stages=4, microbatches=8).draw(),
        "recompute": recompute.draw_memory_over_time(),
        "waits": waits.draw_waits(),
    }


def save(figure: Figure, path: pathlib.Path) -> None:
    """Write a small PNG: 64 colours are plenty."""
    with io.BytesIO() as large:
        figure.savefig(large, dpi=120)
        Image.open(large).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    for name, figure in pictures().items():
        if name in (sys.argv[1:] or [name]):
            save(figure, HERE / f"{name}.png")
            print(HERE / f"{name}.png")
