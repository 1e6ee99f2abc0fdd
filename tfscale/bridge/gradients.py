"""Frees custom gradients together with their graph; TensorFlow would keep them to the end."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

_ATTRIBUTE = "_tfscale_gradients"  # of a graph
_NAMES = "CustomGradient-"
_DEEP = 4  # functions within functions


@contextlib.contextmanager
def ending_with_their_graphs() -> Iterator[None]:
    """Let custom gradients that are made in a block, such as those of sums, end with their graph.

    TensorFlow registers each of them under a name of its own, and forgets none. They hold
    tensors, so a program that trains one model after another kept all graphs and strategies. Here
    the graph holds them, and the registry a function that finds them there.
    """
    registered = gradient_registry._registry
    before = set(registered)
    try:
        yield
    finally:
        for name in set(registered) - before:
            entry = registered.get(name)  # none if another thread's graph has ended since
            graph = _graph_of(entry["type"]) if entry and name.startswith(_NAMES) else None
            if graph is not None:
                _give(graph, name, entry)


@contextlib.contextmanager
def differentiated_by(
    operations: Iterable[tf.Operation], gradient: Callable[..., Any]
) -> Iterator[None]:
    """Replace the gradient of some operations in a block."""
    chosen = list(operations)
    for operation in chosen:
        operation._gradient_function = gradient
    try:
        yield
    finally:
        for operation in chosen:
            operation._gradient_function = None


def _give(graph: tf.Graph, name: str, entry: dict[str, Any]) -> None:
    if not hasattr(graph, _ATTRIBUTE):
        setattr(graph, _ATTRIBUTE, {})
    getattr(graph, _ATTRIBUTE)[name] = entry["type"]
    entry["type"] = _found_in(weakref.ref(graph), name)
    weakref.finalize(graph, gradient_registry._registry.pop, name, None).atexit = False


def _found_in(holder: weakref.ref[tf.Graph], name: str) -> Callable[..., Any]:
    def gradient(op: tf.Operation, *gradients: Any) -> Any:
        return getattr(holder(), _ATTRIBUTE)[name](op, *gradients)

    return gradient


def _graph_of(gradient: Any, deep: int = _DEEP) -> tf.Graph | None:
    """Return the graph of the tensors that a function holds; None if it holds none."""
    for cell in getattr(gradient, "__closure__", None) or ():
        for held in _parts(_content(cell)):
            if tf.is_tensor(held) and hasattr(held, "graph"):  # not of an eager one
                return held.graph
            found = _graph_of(held, deep - 1) if deep and callable(held) else None
            if found is not None:
                return found
    return None


def _parts(held: Any) -> Iterator[Any]:
    """Yield what a structure holds; tf.nest refuses dicts whose keys have no order."""
    if isinstance(held, Mapping):
        held = list(held.values())
    if isinstance(held, (list, tuple)):
        for one in held:
            yield from _parts(one)
    else:
        yield held


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None
