"""Runs programs in all layouts, and prints one table: ``make gallery``.

``python -m tests.gallery --strategy sharded GAN`` runs one of them, with ``shard="optimizer"``.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from tests.gallery.programs import LAYOUTS, PROGRAMS, WORKER
from tests.strategy.compare import spreads, wrongs
from tests.strategy.groups import take


def worst(expected, found):
    """The largest difference of any worker, and how long the slowest took."""
    off = [one for record in found for _, _, one in spreads(expected, record)]
    seconds = max(record["seconds"] for record in found)
    return f"{max(off):.0e}  {seconds:3.0f} s"


def main():
    parser = argparse.ArgumentParser(description="programs in layouts of workers x devices")
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--strategy", default="scale", help="one of tests/strategy/turns.py")
    given = parser.parse_args()
    names = given.names or list(PROGRAMS)
    if unknown := sorted({*names} - {*PROGRAMS}):
        sys.exit(f"no program is called {', '.join(unknown)}; there are: {', '.join(PROGRAMS)}")
    console = Console()
    table = Table("program", "alone", *LAYOUTS)
    with console.status("one device"):
        alone = take(WORKER, "none", "1x1", names)
    outcomes, trouble = {}, []
    for layout in LAYOUTS:
        with console.status(layout):
            outcomes[layout] = take(WORKER, given.strategy, layout, names)
    for name in names:
        program, (expected,) = PROGRAMS[name], alone[name]
        cells = []
        for layout in LAYOUTS:
            found = outcomes[layout][name]
            wrong = [expected["error"]] if "error" in expected else []
            wrong += [] if wrong else wrongs(program, expected, found)
            trouble += [f"{name}, {layout}: {line}" for line in wrong]
            cells.append("[red]differs[/]" if wrong else worst(expected, found))
        table.add_row(name, f"{expected.get('seconds', 0):.0f} s", *cells)
    console.print(
        "The largest difference of any weight, optimizer variable or logged number "
        "(of those above 1 as a share) from one device, and the time with compilation."
    )
    console.print(table)
    for name in names:
        if PROGRAMS[name].why:
            console.print(f"{name} may differ: {PROGRAMS[name].why}.")
    for line in trouble:
        console.print(line, style="red", highlight=False, markup=False)
    return bool(trouble)


if __name__ == "__main__":
    sys.exit(main())
