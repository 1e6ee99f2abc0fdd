"""Stages of a model: which calls each stage makes, and which tensors and weights it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfscale.bridge.models import (
    Graph,
    graph_of,
    only_looks_up,
    spec_of_mask,
    takes_mask_off,
    weights_of,
)
from tfscale.bridge.objects import layers_of
from tfscale.parallel.pipeline import Call, Pipeline, balanced_stages, crossing, named_stages
from tfscale.plan.pipelines import PipelineOrder

_NO_GRAPH = (
    "the model {name!r} ({kind}) has a call of its own, and a pipeline can cut only a "
    "keras.Sequential or a model of layers from inputs to outputs. Make it with "
    "keras.Model(inputs, outputs) from layers, of which some may have a call of their own; or "
    "leave pipeline out"
)
_STATEFUL = (
    "the layer {name!r} of {model!r} is stateful: it keeps a state for each row of a batch, and a "
    "pipeline cuts batches into microbatches. Make it with stateful=False"
)


class Stages:
    """The stages of one model.

    Attributes:
        graph: the graph of the model.
        nodes: for each stage the calls that it makes.
        boundaries: for each stage but the last the symbolic tensors that go to the next stage.
        masks: for each of these tensors its symbolic mask; None if it has none.
        number: number of stages.
    """

    def __init__(self, model: Any, pipeline: Pipeline, order: PipelineOrder) -> None:
        graph = graph_of(model)
        if graph is None:
            raise ValueError(_NO_GRAPH.format(name=model.name, kind=type(model).__name__))
        self.graph: Graph = graph
        self.number, self._order = order.stages, order
        self._refuse(model)
        every = graph.nodes
        calls = _calls(every)
        if pipeline.cuts is None:
            places = balanced_stages(calls, self.number)
        else:
            places = named_stages(calls, pipeline.cuts)
        self.nodes: list[list[Any]] = [[] for _ in range(self.number)]
        for node, stage in zip(every, places, strict=True):
            self.nodes[stage].append(node)
        self.boundaries = self._boundaries(places)
        self.masks = self._masks()
        self._variables = [id(v) for v in model.variables]
        self._of_weight: dict[int, set[int]] = {}
        self._computes_with: set[int] = set()
        for node, stage in zip(every, places, strict=True):
            for weight in weights_of(node.operation):
                self._of_weight.setdefault(id(weight), set()).add(stage)
                if not only_looks_up(node.operation, weight):
                    self._computes_with.add(id(weight))
        owners = order.owners()
        self.ranks = [owners[0, stage] for stage in range(self.number)]

    def are_of(self, model: Any) -> bool:
        """Return whether a model still has the variables that it had when it was cut.

        Layers may get others later, such as those of LoRA.
        """
        return self._variables == [id(v) for v in model.variables]

    def of_weight(self, weight: Any) -> list[int]:
        """Return the stages that use a weight."""
        return sorted(self._of_weight.get(id(weight), ()))

    def is_table(self, weight: Any) -> bool:
        """Return whether all stages that use a weight only look up rows of it."""
        return id(weight) in self._of_weight and id(weight) not in self._computes_with

    def ranks_of_weight(self, weight: Any) -> list[int]:
        """Return the ranks of the pipeline whose stages use a weight."""
        return sorted({self.ranks[stage] for stage in self.of_weight(weight)})

    def _boundaries(self, places: Sequence[int]) -> list[list[Any]]:
        nodes, symbols = self.graph.nodes, {}
        made: dict[int, int] = {}
        needs: list[tuple[int, list[int]]] = []
        for node, stage in zip(nodes, places, strict=True):
            for symbol in node.outputs:
                symbols[id(symbol)], made[id(symbol)] = symbol, stage
            needs.append((stage, [id(symbol) for symbol in node.input_tensors]))
        needs.append((self.number - 1, [id(symbol) for symbol in self.graph.outputs]))
        return [[symbols[key] for key in cut] for cut in crossing(needs, made, self.number)]

    def _masks(self) -> list[list[Any]]:
        found: list[list[Any]] = []
        bare: set[int] = set()
        for nodes, cut in zip(self.nodes, self.boundaries, strict=False):
            for node in nodes:
                bare |= {id(x) for x in node.input_tensors if takes_mask_off(node.operation, x)}
            found.append([None if id(x) in bare else spec_of_mask(x) for x in cut])
        return found

    def _refuse(self, model: Any) -> None:
        for layer in layers_of(model):
            if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
                raise ValueError(_STATEFUL.format(name=layer.name, model=model.name))


def _calls(nodes: Sequence[Any]) -> list[Call]:
    """Return the calls of a graph, for those who cut it."""
    place: dict[int, int] = {}
    found: list[Call] = []
    seen: set[int] = set()
    for i, node in enumerate(nodes):
        weights = {id(v): v for v in weights_of(node.operation)}
        cost = sum(_size(v) for key, v in weights.items() if key not in seen)
        seen |= set(weights)
        needs = {place[id(x)] for x in node.input_tensors if id(x) in place}
        found.append(Call(node.operation.name, tuple(sorted(needs)), cost))
        place |= {id(symbol): i for symbol in node.outputs}
    return found


def _size(weight: Any) -> int:
    size = 1
    for side in weight.shape:
        size *= side
    return size
