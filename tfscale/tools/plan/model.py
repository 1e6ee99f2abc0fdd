"""Models that a command line names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


class ModelError(Exception):
    """A model that cannot be had; the message says why."""


def load_model(text: str) -> Any:
    """Return the model of ``FILE.py:NAME``, where NAME is a model or makes one, or of a file."""
    import keras

    if text.endswith(".keras"):
        return keras.models.load_model(text, compile=False)
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ModelError(
            f"MODEL is {text!r}; expected FILE.py:NAME, a .keras file, or a .json file of --save"
        )
    found = _attribute(Path(file), name)
    model = found if isinstance(found, keras.Model) or not callable(found) else found()
    if not isinstance(model, keras.Model):
        raise ModelError(f"{name} of {file} is a {type(model).__name__}; expected a Keras model")
    return model


def _attribute(file: Path, name: str) -> Any:
    if not file.exists():
        raise ModelError(f"there is no file {str(file)!r}; MODEL is FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent.resolve()))
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ModelError(f"{file} has no {name!r}; MODEL is FILE.py:NAME")
    return getattr(module, name)
