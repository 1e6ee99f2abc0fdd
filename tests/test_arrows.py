"""Arrows between folders point down only."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Lowest first: who stands on a floor may use those below it, and nobody beside it.
FLOORS = (
    ("support",),
    ("bridge", "cluster", "collectives"),
    ("native",),
    ("compression",),
    ("exchange", "sync"),
    ("analysis",),
    ("training",),
    ("callbacks",),
    ("strategy",),
    ("tfscale",),
    ("tools",),
    ("__main__",),
)
NATIVE_FLOORS = (("wire",), ("engine", "optimizers", "compression"), ("transport",), ("kernels",))


def room(module):
    """Return ``native`` for ``tfscale.native.library``; for ``tfscale.rank`` return ``tfscale``."""
    first = module.split(".")[1] if "." in module else ""
    there = ROOT / "tfscale" / first
    return first if first and (there.is_dir() or there.with_suffix(".py").exists()) else "tfscale"


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "tfscale":
            yield from (f"tfscale.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports say where from"
            yield node.module


def python_arrows():
    for file in sorted((ROOT / "tfscale").rglob("*.py")):
        own = room(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        for module in imported(ast.parse(file.read_text())):
            if module.split(".")[0] == "tfscale" and room(module) != own:
                yield file.relative_to(ROOT), own, room(module)


def native_files():
    for file in sorted((ROOT / "custom_ops").rglob("*")):
        if file.suffix in (".h", ".cc", ".inc"):
            place = file.relative_to(ROOT)
            yield place, place.parts[1], file.read_text()


def native_arrows():
    for file, own, text in native_files():
        for other in re.findall(r'#include "custom_ops/(\w+)/', text):
            if other != own:
                yield file, own, other


@pytest.mark.parametrize(
    "arrows, floors",
    [(python_arrows, FLOORS), (native_arrows, NATIVE_FLOORS)],
    ids=["python", "native"],
)
def test_arrows_point_down(arrows, floors):
    height = {name: i for i, floor in enumerate(floors) for name in floor}
    found = list(arrows())
    assert len(found) > 10, "the imports were not found"
    up = [
        f"{file}: {own} uses {other}" for file, own, other in found if height[other] >= height[own]
    ]
    assert not up


def test_floors_are_what_there_is():
    there = {
        file.stem
        for file in (ROOT / "tfscale").iterdir()
        if file.suffix == ".py" or (file / "__init__.py").exists()
    }
    assert {name for floor in FLOORS for name in floor} == there - {"__init__"} | {"tfscale"}


def test_tensorflow_is_known_to_its_transport_and_the_kernels_alone():
    of_tensorflow = ("transport/tensorflow", "kernels/")
    strangers = [
        file
        for file, _, text in native_files()
        if re.search(r'#include "(tensorflow|tsl|absl|xla)/', text)
        and not any(part in str(file) for part in of_tensorflow)
    ]
    assert not strangers
