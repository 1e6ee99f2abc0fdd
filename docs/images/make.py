"""Draw the pictures of the documents about schedules: ``python docs/images/make.py``."""

from __future__ import annotations

import io
import pathlib

from PIL import Image

from tfscale import collectives

HERE = pathlib.Path(__file__).parent
PICTURES = {
    "ring": collectives.ring(4),
    "tree": collectives.tree(8),
    "halving": collectives.halving(8),
    "direct": collectives.direct(5),
    "hierarchical": collectives.hierarchical([4, 4]),
    "central": collectives.central(4),
}


def of_the_document() -> collectives.Schedule:
    """The schedule that the first code of docs/custom-schedules.md makes."""
    text = (HERE.parent / "custom-schedules.md").read_text()
    namespace: dict[str, collectives.Schedule] = {}
    exec(text.split("```python")[1].split("```")[0], namespace)
    return namespace["mine"]


def save(schedule: collectives.Schedule, path: pathlib.Path) -> None:
    """Write a small PNG: 64 colours are plenty."""
    with io.BytesIO() as large:
        schedule.draw().savefig(large, dpi=120)
        Image.open(large).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    for name, schedule in {**PICTURES, "pairs": of_the_document()}.items():
        save(schedule, HERE / f"{name}.png")
        print(HERE / f"{name}.png")
