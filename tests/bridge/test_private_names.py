"""Private names of Keras and TensorFlow, frames and class swaps are in ``tfscale/bridge`` alone."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "tfscale"

PRIVATE_MODULES = ("tensorflow.python", "keras.src")
FRAMES = {"f_back", "f_locals", "currentframe", "walk_tb", "walk_stack"}
# Documented by Python, though they begin with an underscore.
OF_PYTHON = {"_replace", "_asdict", "_fields", "_make", "_exit"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
SELF = {"self", "cls"}


def is_private(name):
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def is_own_object(node):
    """Whether an expression is ``self``, ``cls`` or ``super()``, of a class of the file."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in SELF


def names_of_own_classes(tree):
    """Return the private names that classes of a file define: methods and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_own_object(node.value) else set()
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(each.name)
                targets = each.targets if isinstance(each, ast.Assign) else []
                targets += [each.target] if isinstance(each, ast.AnnAssign) else []
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def docstrings(tree):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, kinds) and node.body and isinstance(node.body[0], ast.Expr)
    }


def called_name(node):
    return node.func.id if isinstance(node.func, ast.Name) else None


def private_attribute(node, own):
    if not isinstance(node, ast.Attribute) or not is_private(node.attr):
        return False
    return not (is_own_object(node.value) or node.attr in own | OF_PYTHON)


def private_by_name(node):
    if not isinstance(node, ast.Call) or called_name(node) not in BY_NAME:
        return False
    thing, name = node.args[:2]
    return not is_own_object(thing) and isinstance(name, ast.Constant) and is_private(name.value)


def swaps_class(node):
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "__class__"
        and isinstance(node.ctx, ast.Store)
    )


def writes_past_a_class(node):
    """Whether ``vars(thing)`` is written to, which is how hooks are put on objects."""
    changes = isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del))
    calls = isinstance(node, ast.Attribute) and node.attr in ("pop", "setdefault", "update")
    if not (changes or calls) or not isinstance(node.value, ast.Call):
        return False
    return called_name(node.value) == "vars" and not is_own_object(node.value.args[0])


def private_module(node, documented):
    if isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
        names += [f"{node.module}.{each.name}" for each in node.names]
    elif isinstance(node, ast.Import):
        names = [each.name for each in node.names]
    elif isinstance(node, ast.Constant) and id(node) not in documented:
        names = [node.value] if isinstance(node.value, str) else []
    else:
        return False
    return any(name.startswith(PRIVATE_MODULES) for name in names)


def findings_in(text, place="text"):
    tree = ast.parse(text)
    own, documented = names_of_own_classes(tree), docstrings(tree)
    for node in ast.walk(tree):
        found = {
            "a private module": private_module(node, documented),
            "a private name": private_attribute(node, own) or private_by_name(node),
            "frames": isinstance(node, ast.Attribute) and node.attr in FRAMES,
            "a class swap": swaps_class(node),
            "an attribute past its class": writes_past_a_class(node),
        }
        for what in (what for what, there in found.items() if there):
            yield f"{place}:{node.lineno}: {what}: {ast.unparse(node)}"


def test_only_the_bridge_knows_private_names():
    found = [
        finding
        for file in sorted(ROOT.rglob("*.py"))
        if file.relative_to(ROOT).parts[0] != "bridge"
        for finding in findings_in(file.read_text(), file.relative_to(ROOT.parent))
    ]
    advice = "move what these do into a function of tfscale/bridge, grouped by subject:"
    assert not found, "\n".join([advice, *found])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("from tensorflow.python.eager import context", "a private module"),
        ("from keras import src", "a private module"),
        ("import keras.src.losses", "a private module"),
        ("import importlib\nimportlib.import_module('keras.src.losses')", "a private module"),
        ("strategy.extended._num_workers", "a private name"),
        ("def f(model):\n    return model._flat_losses", "a private name"),
        ("getattr(optimizer, '_momentums', None)", "a private name"),
        ("import sys\nsys._getframe(1)", "a private name"),
        ("import inspect\ninspect.currentframe()", "frames"),
        ("frame.f_locals", "frames"),
        ("variable.__class__ = Weight", "a class swap"),
        ("vars(model)['train_step'] = step", "an attribute past its class"),
        ("vars(model).pop('train_step', None)", "an attribute past its class"),
        ("del vars(model)['build']", "an attribute past its class"),
    ],
)
def test_the_walk_finds(text, what):
    found = list(findings_in(text))
    assert f"text:{len(text.splitlines())}: {what}: " in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self, other):\n        self._x = 1\n        return other._x",
        "class A(B):\n    def _save(self):\n        return super()._save() + self._path",
        "record._replace(name='x')",
        "import os\nos._exit(1)",
        "class A:\n    _x: int\n\ndef f(a: A):\n    return a._x",
        '"""See keras.src.losses."""',
        "type(one).__name__ == one.__class__.__name__",
        "vars(self)['x'] = 1",
    ],
)
def test_the_walk_leaves_alone(text):
    assert not list(findings_in(text))
