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
    ("exchange", "plan", "sync"),
    ("analysis",),
    ("training",),
    ("parallel",),
    ("callbacks",),
    ("strategy",),
    ("tfscale",),
    ("tools",),
    ("__main__",),
)
NATIVE_FLOORS = (
    ("wire",),
    ("engine", "optimizers", "compression", "search"),
    ("transport",),
    ("kernels",),
)


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


def modules():
    """Return all modules of tfscale by name, without packages' ``__init__``, which only gathers."""
    files = (ROOT / "tfscale").rglob("*.py")
    named = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    return {name: file for name, file in named.items() if file.name != "__init__.py"}


def imports_inside_rooms():
    """Return for each module those that it imports from its own room, also for types only."""
    there, found = modules(), {}
    for name, file in there.items():
        used = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                used |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                used |= {node.module} | {f"{node.module}.{each.name}" for each in node.names}
        found[name] = {one for one in used & set(there) - {name} if room(one) == room(name)}
    return found


def reached(graph, start):
    seen, waiting = set(), list(graph[start])
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += graph[one]
    return seen


def circles(graph):
    """Return the sets of modules that import each other, directly or not."""
    reach = {one: reached(graph, one) for one in graph}
    found = {
        frozenset(other for other in reach[one] if one in reach[other])
        for one in graph
        if one in reach[one]
    }
    return {named(circle) for circle in found}


def named(circle):
    folders = {one.rpartition(".")[0] for one in circle}
    folder = min(folders, key=len).split(".", 1)[1].replace(".", "/")
    return f"{folder}/" + " ".join(sorted(one.rpartition(".")[2] for one in circle))


def test_a_circle_is_found():
    graph = {"tfscale.a.b": {"tfscale.a.c"}, "tfscale.a.c": {"tfscale.a.d"}}
    assert circles(graph | {"tfscale.a.d": {"tfscale.a.b"}}) == {"a/b c d"}
    assert not circles(graph | {"tfscale.a.d": set()})


def test_no_circles_inside_rooms():
    assert not circles(imports_inside_rooms())


def attributes_of_strategies():
    """Return what ``ScaleStrategy`` has of its own, and what lower rooms know that it has."""
    own, declared = (
        next(
            node
            for node in ast.parse((ROOT / "tfscale" / file).read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == name
        )
        for file, name in (
            ("strategy/strategy.py", "ScaleStrategy"),
            ("exchange/scaling.py", "Scaling"),
        )
    )
    of_tensorflow = {"scope", "run", "reduce", "num_replicas_in_sync", "cluster_resolver"}
    of_tensorflow |= {"experimental_distribute_dataset"}
    return members(own) - of_tensorflow - members(declared), members(declared)


def members(node):
    """Return the public names of a class: methods, annotations and attributes of ``self``."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef):
            found.add(each.name)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found.add(each.attr)
    found |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    return {name for name in found if not name.startswith("_")}


def guesses(tree, undeclared, declared):
    """Yield expressions that ask a strategy for what the file cannot know that it has.

    ``getattr`` and ``hasattr`` may ask for nothing that a ``ScaleStrategy`` has. Other expressions
    may use what ``Scaling`` declares.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            what = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            asked = node.func.id in ("getattr", "hasattr") and what in undeclared | declared
            if asked and is_strategy(node.args[0]):
                yield ast.unparse(node)
        elif (
            isinstance(node, ast.Attribute) and node.attr in undeclared and is_strategy(node.value)
        ):
            yield ast.unparse(node)


def is_strategy(node):
    return ast.unparse(node).removesuffix("()").endswith("strategy")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("getattr(model.distribute_strategy, 'rounds', None)", True),
        ("hasattr(strategy, 'part_of_mean')", True),
        ("tf.distribute.get_strategy().rounds", True),
        ("scaling(strategy).reducers", False),
        ("strategy.num_replicas_in_sync", False),
        ("getattr(machine, 'rounds')", False),
    ],
)
def test_a_guess_at_a_strategy_is_found(text, found):
    assert bool(list(guesses(ast.parse(text), *attributes_of_strategies()))) == found


def test_lower_rooms_know_what_they_ask_a_strategy_for():
    """A room below ``strategy`` uses ``exchange.scaling``, and guesses at no attribute."""
    names = attributes_of_strategies()
    below = next(i for i, floor in enumerate(FLOORS) if "strategy" in floor)
    rooms = {name for floor in FLOORS[:below] for name in floor}
    found = {
        f"{name}: {guess}"
        for name, file in modules().items()
        if room(name) in rooms
        for guess in guesses(ast.parse(file.read_text()), *names)
    }
    assert not found
