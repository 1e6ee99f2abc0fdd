"""Pictures of docs/architecture.md: the rooms, and a gradient's path through them."""

from __future__ import annotations

import ast
import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import tfscale
from tfscale.support import figures

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"

INK = "#30343b"
FAINT = "#d9dce1"
ROOM = (1.5, 0.46)  # width and height of a room's box
ROOM_DISTANCE = 2.0
NOUNS = {
    "Team": "#f3d9b1",
    "Step": "#c9dcf2",
    "Sum": "#cfe8cf",
    "Slot": "#e3d3ee",
    "Hook": "#f2cfd0",
    "": "#eef0f3",
}


class Station(NamedTuple):
    """A row of the table of a gradient's path."""

    direction: str
    noun: str
    file: str
    function: str
    what: str


def stations() -> list[Station]:
    """Read the table of a gradient's path from docs/architecture.md."""
    rows = re.findall(r"^\| (?:out|back) \|.*\|$", PAGE.read_text(), re.MULTILINE)
    cells = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows]
    return [Station(*row) for row in cells]


def rooms() -> list[str]:
    """Return the names of the folders in tfscale/ that hold code."""
    return sorted(file.parent.name for file in (ROOT / "tfscale").glob("*/__init__.py"))


def _imported(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "tfscale":
            yield from (f"tfscale.{each.name}" for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _room(module: str) -> str:
    """Return the room of a module, also of a module's short name; empty if there is none."""
    short = ".".join(module.split(".")[:2])
    full = {**tfscale._PACKAGES, **{f"tfscale.{k}": v for k, v in tfscale._OBJECTS.items()}}
    parts = full.get(short, module).split(".")
    return parts[1] if parts[0] == "tfscale" and len(parts) > 1 else ""


def imports() -> dict[str, set[str]]:
    """Return for each room the other rooms that it imports, for types alone, too."""
    found: dict[str, set[str]] = {room: set() for room in rooms()}
    for own, used in found.items():
        for file in (ROOT / "tfscale" / own).rglob("*.py"):
            used |= {_room(module) for module in _imported(file.read_text())}
        used &= found.keys() - {own}
    return found


def floors(arrows: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room: as high as possible, below all rooms that import it.

    Raises:
        RecursionError: some rooms import each other in a circle.
    """

    def depth(room: str) -> int:
        return 1 + max((depth(user) for user, used in arrows.items() if room in used), default=-1)

    deepest = max(map(depth, arrows))
    return {room: deepest - depth(room) for room in arrows}


def without_detours(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out each arrow to a room that other arrows lead to as well."""

    def reached(room: str) -> set[str]:
        return arrows[room].union(*(reached(other) for other in arrows[room]))

    return {
        room: used - set().union(*(reached(other) for other in used))
        for room, used in arrows.items()
    }


def draw_rooms() -> Figure:
    """Draw the rooms on their floors, with the arrows of their imports."""
    arrows = without_detours(imports())
    place = _places(floors(arrows), arrows)
    top = max(y for _, y in place.values())
    figure = figures.figure(7.0, 0.62 * (top + 1))
    axes = _empty(figure, (-3.5, 3.5), (-0.4, top + 0.4))
    for room, used in arrows.items():
        for other in used:
            _arrow_between_rooms(axes, place[room], place[other])
    for room, (x, y) in place.items():
        _box(axes, x, y, *ROOM, NOUNS["Step"])
        axes.text(x, y, room, ha="center", va="center", color=INK, fontsize=9)
    return figure


def _places(height: dict[str, int], arrows: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """Place rooms side by side; rooms with a long way to the floor of their imports stand outside.

    An arrow over several floors then passes no other room.
    """
    place: dict[str, tuple[float, float]] = {}
    for floor in sorted(set(height.values()), reverse=True):
        names = sorted(room for room in height if height[room] == floor)
        long = {room for room in names if any(floor - height[to] > 1 for to in arrows[room])}
        row = [*(room for room in names if room not in long), *sorted(long)]
        left = -ROOM_DISTANCE * (len(row) - len(long) - 1) / 2
        for i, room in enumerate(row):
            place[room] = (left + ROOM_DISTANCE * i, float(floor))
    return place


def _arrow_between_rooms(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow straight to the next floor; over several floors, at the side of the rooms."""
    if start[1] - end[1] <= 1:
        _arrow(axes, start, end, ROOM[1] / 2)
        return
    side = 1 if start[0] > end[0] else -1
    axes.plot([start[0]] * 2, [start[1], end[1]], color=INK, lw=0.8, zorder=0)
    _arrow_line(axes, (start[0], end[1]), (end[0] + side * ROOM[0] / 2, end[1]))


def draw_gradient() -> Figure:
    """Draw a gradient's path: from fit down to the socket, and back up."""
    path = stations()
    out = [each for each in path if each.direction == "out"]
    back = [each for each in path if each.direction == "back"]
    bottom = len(out)
    figure = figures.figure(10.0, 0.62 * bottom + 1.2)
    axes = _empty(figure, (-0.1, 10.1), (bottom + 0.5, -1.0))
    rows = [(2.4, float(y), each) for y, each in enumerate(out)]
    gap = (bottom - 1) / max(1, len(back) - 1)
    rows += [(7.6, bottom - 1 - gap * i, each) for i, each in enumerate(back)]
    points = [(x, y) for x, y, _ in rows]
    turn = len(out)
    ends = [[(2.4, -0.75), *points[:turn], (2.4, bottom)]]
    ends += [[(7.6, bottom), *points[turn:], (7.6, -0.75)]]
    for line in ends:
        for start, end in itertools.pairwise(line):
            _arrow(axes, start, end, 0.3)
    for x, y, station in rows:
        _station(axes, x, y, station)
    for x in (2.4, 7.6):
        axes.text(x, -0.8, "model.fit", ha="center", va="center", color=INK, fontsize=10)
    _box(axes, 5.0, bottom + 0.2, 9.8, 0.45, FAINT)
    axes.text(5.0, bottom + 0.2, "socket: the other ranks", ha="center", va="center", fontsize=9)
    for i, noun in enumerate(name for name in NOUNS if name):
        _box(axes, 3.4 + 0.8 * i, -0.8, 0.66, 0.3, NOUNS[noun])
        axes.text(3.4 + 0.8 * i, -0.8, noun, ha="center", va="center", color=INK, fontsize=8)
    return figure


def _station(axes: Axes, x: float, y: float, station: Station) -> None:
    _box(axes, x, y, 4.6, 0.62, NOUNS[station.noun])
    short = station.file.removeprefix("tfscale/").removeprefix("custom_ops/")
    head = f"{short}: {station.function}"
    axes.text(x, y - 0.13, head, ha="center", va="center", color=INK, fontsize=7.5, weight="bold")
    what = station.what.replace("`", "")
    axes.text(x, y + 0.15, what, ha="center", va="center", color=INK, fontsize=7)


def _empty(figure: Figure, across: tuple[float, float], up: tuple[float, float]) -> Axes:
    axes = figure.add_subplot()
    axes.set_xlim(*across)
    axes.set_ylim(*up)
    axes.axis("off")
    return axes


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch(
            corner, width, height, boxstyle=style, facecolor=colour, edgecolor=INK, lw=0.6
        )
    )


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], distance: float
) -> None:
    """Draw an arrow that begins and ends above or below the middles of two boxes."""
    down = 1 if end[1] > start[1] else -1
    _arrow_line(axes, (start[0], start[1] + down * distance), (end[0], end[1] - down * distance))


def _arrow_line(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 0.8, "shrinkA": 0, "shrinkB": 0},
        zorder=0,
    )
