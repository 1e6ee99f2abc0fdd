"""Docstrings: whatever users call has one, nearly all other code does, and their examples run."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT

import tfscale

SOURCES = sorted((ROOT / "tfscale").rglob("*.py"))
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def module_of(source: Path) -> str:
    return ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


# ---------------------------------------------------------------------- examples


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Return names that examples use without making them: a small compiled model, and its data."""
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(8, "tanh") for _ in range(8)]
    model = keras.Sequential([keras.Input([8]), *hidden, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones([128, 8], "float32"), np.ones([128, 1], "float32")
    return {"keras": keras, "tf": tf, "tfscale": tfscale, "model": model, "x": x, "y": y}


WITH_EXAMPLES = [
    module_of(source)
    for source in SOURCES
    if re.search(r"^\s*>>> (?!.*SKIP)", source.read_text(), re.MULTILINE)
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_run_and_print_what_they_say(module, names):
    found = importlib.import_module(module)
    failed, tried = doctest.testmod(found, globs=names | vars(found), optionflags=doctest.ELLIPSIS)
    assert tried and not failed


# ---------------------------------------------------------------------- who has one

MODULES = [importlib.import_module(module_of(s)) for s in SOURCES if s.name == "__init__.py"]
PACKAGES = [module for module in MODULES if hasattr(module, "__all__")]


def public():
    """Names in ``__all__`` of tfscale and its packages, and the public methods of classes there."""
    for package in PACKAGES:
        for name in package.__all__:
            found = getattr(package, name)
            if inspect.isfunction(found) or inspect.isclass(found):
                yield f"{package.__name__}.{name}", found
            if inspect.isclass(found):
                for key, value in vars(found).items():
                    method = getattr(value, "fget", getattr(value, "__func__", value))
                    if inspect.isfunction(method) and not key.startswith("_"):
                        yield f"{package.__name__}.{name}.{key}", method


def test_all_that_users_call_has_a_docstring():
    seen = dict(public())
    assert len(seen) > 200
    assert not [name for name, found in seen.items() if not found.__doc__]


def defined(tree, prefix):
    """Functions, classes and methods whose names have no underscore in front."""
    for node in tree.body:
        if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from defined(node, f"{prefix}.{node.name}")


def test_nearly_all_in_the_house_has_a_docstring():
    found = {
        name: ast.get_docstring(node)
        for source in SOURCES
        for name, node in defined(ast.parse(source.read_text()), module_of(source))
    }
    missing = [name for name, words in found.items() if not words]
    assert len(missing) <= 0.05 * len(found), missing
