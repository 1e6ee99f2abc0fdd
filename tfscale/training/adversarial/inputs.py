"""Selection of the inputs that an attack moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.support import arguments

ALONE = "x"  # the name of an only input


class Inputs:
    """The inputs to move, among all inputs of a model.

    Args:
        x: the model's input: a tensor, or a structure of tensors.
        names: names of the inputs to move; by default all, which must then be floating-point.
    """

    def __init__(self, x: Any, names: Sequence[str] | None) -> None:
        self._all = x
        self._flat = keras.tree.flatten(x)
        found = [_name(path) for path, _ in keras.tree.flatten_with_path(x)]
        self._places = range(len(found)) if names is None else _places(found, names)
        for place in self._places:
            _check(found[place], self._flat[place], found)

    @property
    def moved(self) -> list[Any]:
        """The inputs to move."""
        return [self._flat[place] for place in self._places]

    def with_moved(self, moved: Sequence[Any]) -> Any:
        """Return the model's input with other tensors as the moved inputs."""
        flat = list(self._flat)
        for place, x in zip(self._places, moved, strict=True):
            flat[place] = x
        return keras.tree.pack_sequence_as(self._all, flat)


def checked_names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of inputs that a user gives, or raise."""
    expected = 'a list of names, such as ["image"]'
    return arguments.optional(arguments.items, names, "inputs", expected, arguments.text)


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path)) or ALONE


def _places(found: list[str], names: Sequence[str]) -> list[int]:
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(
            f"inputs names {unknown[0]!r}, but the model receives {_listed(found)}. A name is a "
            "key of a dict, a position in a list such as '0', or 'a/b' for b within a"
        )
    return [found.index(name) for name in names]


def _check(name: str, x: Any, found: list[str]) -> None:
    if not tf.is_tensor(x) or isinstance(x, (tf.SparseTensor, tf.RaggedTensor)):
        raise ValueError(
            f"an attack moves the numbers of a dense tensor, and the input {name!r} is "
            f"a {type(x).__name__}. {_others(found)}"
        )
    if not x.dtype.is_floating:
        raise ValueError(
            f"an attack moves floating-point numbers a little, and the input {name!r} is "
            f"{x.dtype.name}. Cast images before fit, as in data.map(lambda x, y: (tf.cast(x, "
            f'"float32"), y)); words and other indices cannot be moved. {_others(found)}'
        )
    if x.shape.rank == 0:
        raise ValueError(
            f"an attack moves samples, and the input {name!r} is one number. {_others(found)}"
        )


def _others(found: list[str]) -> str:
    if len(found) == 1:
        return "It is the only input"
    return f"inputs=[...] chooses the inputs to move, of {_listed(found)}"


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
