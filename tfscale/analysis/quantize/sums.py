"""Layers that feed one sum: integer execution is simplest if they have the same width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tfscale.analysis.quantize.kernels import Kernel
from tfscale.bridge.objects import layers_of, operations_of, parents_of


def sums_of(model: Any, kernels: Sequence[Kernel]) -> list[tuple[str, ...]]:
    """Return the paths of layers that feed one sum, for each sum of two such layers or more.

    A path from a layer to a sum leads through normalization, activations and other layers with one
    input. It ends at another sum, so a chain of residual blocks does not tie all its layers.
    """
    by_layer = {id(kernel.layer): kernel.path for kernel in kernels}
    found: list[tuple[str, ...]] = []
    for part in [model, *layers_of(model)]:
        operations = {id(one): one for one in operations_of(part)}
        for operation in operations.values():
            if type(operation).__name__ == "Add":  # of keras.layers, and of x + y
                feeding = [
                    path
                    for parent in parents_of(operation)
                    if id(parent) in operations
                    for path in _sources(parent, operations, by_layer)
                ]
                tied = tuple(dict.fromkeys(feeding))
                if len(tied) > 1 and tied not in found:
                    found.append(tied)
    return found


def _sources(operation: Any, operations: Any, by_layer: dict[int, str]) -> Iterator[str]:
    while id(operation) not in by_layer:
        parents = [one for one in parents_of(operation) if id(one) in operations]
        if len(parents) != 1 or type(operation).__name__ == "Add":
            return
        operation = parents[0]
    yield by_layer[id(operation)]
