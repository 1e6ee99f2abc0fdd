"""Models that a command line names: ``train.py:model``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from tfscale.support.names import guess


class ModelError(Exception):
    """A model that cannot be had; the message says why."""


def load_model(text: str) -> Any:
    """Return the model of ``FILE.py:NAME``, where NAME is a model or makes one, or of a file."""
    import keras

    if text.endswith(".keras"):
        _check_exists(Path(text))
        return keras.models.load_model(text)
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ModelError(f"MODEL is {text!r}; expected FILE.py:NAME or a .keras file")
    found = _attribute(Path(file), name)
    model = found if isinstance(found, keras.Model) or not callable(found) else _made(found, text)
    if not isinstance(model, keras.Model):
        kind = type(model).__name__
        raise ModelError(
            f"{name!r} of {file} is or returns a {kind}; expected a Keras model, or a function "
            "without arguments that returns one"
        )
    return model


def _made(make: Any, text: str) -> Any:
    try:
        return make()
    except TypeError as error:
        raise ModelError(
            f"{text} was called without arguments and raised {error}; expected a function that "
            "needs none and returns a Keras model"
        ) from error


def _check_exists(file: Path) -> None:
    if not file.is_file():
        raise ModelError(f"there is no file {str(file)!r}; MODEL is FILE.py:NAME or a .keras file")


def _attribute(file: Path, name: str) -> Any:
    """Import a file as a module, though not as the main program; return what has that name."""
    _check_exists(file)
    name_of_module = f"__{file.stem}__"  # a file may be called as a module of Python is
    spec = importlib.util.spec_from_file_location(name_of_module, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name_of_module] = module
    sys.path.insert(0, str(file.parent.resolve()))
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        hint = guess(name, public)
        raise ModelError(
            f"{file} has no {name!r}; MODEL is FILE.py:NAME, the name of a model or of a function "
            f"that returns one. {hint}".rstrip()
        )
    return getattr(module, name)
