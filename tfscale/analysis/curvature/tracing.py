"""The operations that lead to a tensor, in the graph that is being traced and in outer graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class TracedGraphs:
    """The graph that is being traced, and all outer graphs whose tensors it captures.

    A branch of ``tf.cond`` or the body of a loop is a separate graph. A tensor that it captures has
    another name inside.
    """

    def __init__(self) -> None:
        self._graphs = list(_from_inner_to_outer())
        self._outer = {
            id(inner): outer for graph in self._graphs for outer, inner in graph.captures
        }

    def origin(self, tensor: Any) -> Any:
        """Return the tensor as it was made, perhaps by a caller: then it is not symbolic."""
        while id(tensor) in self._outer:
            tensor = self._outer[id(tensor)]
        return tensor

    def is_made_here(self, tensor: Any) -> bool:
        """Return whether any of these graphs computes a tensor, instead of receiving it."""
        origin = self.origin(tensor)
        return _is_symbolic(origin) and origin.op.type != "Placeholder"

    def names(self, handles: list[Any]) -> list[list[Any]]:
        """Return for each tensor its names in the graphs that captured it."""
        places = {id(handle): i for i, handle in enumerate(handles)}
        names: list[list[Any]] = [[] for _ in handles]
        for graph in reversed(self._graphs):
            for outer, inner in graph.captures:
                if id(outer) in places:
                    places[id(inner)] = places[id(outer)]
                    names[places[id(inner)]].append(inner)
        return names

    def operations_before(self, tensors: list[Any]) -> Iterator[Any]:
        """Yield all operations that tensors depend on."""
        waiting, seen = list(tensors), set()
        while waiting:
            tensor = self.origin(waiting.pop())
            if _is_symbolic(tensor) and tensor.op not in seen:
                seen.add(tensor.op)
                yield tensor.op
                waiting.extend(tensor.op.inputs)


def _from_inner_to_outer() -> Iterator[Any]:
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, tf.__internal__.FuncGraph):
        yield graph
        graph = graph.outer_graph


def _is_symbolic(tensor: Any) -> bool:
    return not isinstance(tensor, tf.__internal__.EagerTensor)
