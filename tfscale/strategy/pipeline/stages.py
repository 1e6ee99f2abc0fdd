"""Stages of a model: which calls each stage makes, and which tensors and weights it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from tfscale.bridge.models import (
    Graph,
    graph_of,
    only_looks_up,
    takes_mask_off,
    weights_of,
)
from tfscale.bridge.objects import layers_of, mask_of, native
from tfscale.parallel.pipeline import (
    Call,
    Pipeline,
    balanced_stages,
    crossing,
    named_stages,
    parts_of_ranks,
    stages_beside,
)
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

_OTHER_ORDER = (
    "{name!r} calls {layer!r} behind layers of later stages. Models that were cut into stages "
    "before hold this layer in stage {stage}, and a stage gets nothing from later ones. Compile "
    "the model with the most layers first: the others then follow its stages"
)
_IN_SEVERAL = (
    "{name!r} calls {layer!r} in one stage, and models that were cut into stages before hold its "
    "weights in several. Compile the model with the most layers first: the others then follow its "
    "stages"
)


class Stages:
    """The stages of one model.

    Attributes:
        graph: the graph of the model.
        nodes: for each stage the calls that it makes.
        boundaries: for each stage but the last the symbolic tensors that go to the next stage.
        masks: for each of these tensors its symbolic mask; None if it has none.
        number: number of stages.
        parts: for each rank the number of the part of the model that it holds.
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
        self.parts, owners = parts_of_ranks(order), order.owners()
        self._part_of_stage = [self.parts[owners[0, stage]] for stage in range(self.number)]
        places = self._places(calls, pipeline.cuts)
        self.nodes: list[list[Any]] = [[] for _ in range(self.number)]
        for node, stage in zip(every, places, strict=True):
            self.nodes[stage].append(node)
        self.boundaries = self._boundaries(places)
        self.masks = self._masks()
        crossing = [symbol for cut in self.boundaries for symbol in cut]
        begin = zip(crossing, graph.begin_with_rows(crossing), strict=True)
        self._moved = {id(symbol) for symbol, has_rows in begin if not has_rows}
        self._variables = [id(v) for v in model.variables]
        self._of_weight: dict[int, set[int]] = {}
        self._computes_with: set[int] = set()
        for node, stage in zip(every, places, strict=True):
            for weight in weights_of(node.operation):
                self._of_weight.setdefault(id(weight), set()).add(stage)
                if not only_looks_up(node.operation, weight):
                    self._computes_with.add(id(weight))

    def _places(self, calls: Sequence[Call], cuts: Sequence[str] | None) -> list[int]:
        """Return the stage of each call; layers of other models stay where those have them."""
        allowed = [self._allowed(node.operation) for node in self.graph.nodes]
        if all(len(stages) == self.number for stages in allowed):
            if cuts is None:
                return balanced_stages(calls, self.number)
            return named_stages(calls, cuts)
        if cuts is not None and {*cuts} <= {call.name for call in calls}:
            places = named_stages(calls, cuts)
            if all(place in stages for place, stages in zip(places, allowed, strict=True)):
                return places
        found = stages_beside(calls, allowed, self.number)
        if found is not None:
            return found
        stage = 0
        for call, stages in zip(calls, allowed, strict=True):
            if max(stages) < stage:
                words = {"name": self.graph.model.name, "layer": call.name, "stage": max(stages)}
                raise ValueError(_OTHER_ORDER.format(**words))
            stage = min(one for one in stages if one >= stage)
        raise AssertionError("stages_beside finds stages if each call has a later one")

    def _allowed(self, operation: Any) -> list[int]:
        """Return the stages that may call a layer: those whose ranks hold its weights."""
        parts = {part for v in weights_of(operation) if (part := part_of(v)) is not None}
        if len(parts) > 1:
            words = {"name": self.graph.model.name, "layer": operation.name}
            raise ValueError(_IN_SEVERAL.format(**words))
        return [stage for stage, part in enumerate(self._part_of_stage) if {part} >= parts]

    def are_of(self, model: Any) -> bool:
        """Return whether a model still has the variables that it had when it was cut.

        Layers may get others later, such as those of LoRA.
        """
        return self._variables == [id(v) for v in model.variables]

    def shape_is_sent(self, symbol: Any) -> bool:
        """Return whether only the stage that makes a tensor knows its shape, beside its rows."""
        return None in symbol.shape[1:] or (len(symbol.shape) > 0 and id(symbol) in self._moved)

    def of_weight(self, weight: Any) -> list[int]:
        """Return the stages that use a weight."""
        return sorted(self._of_weight.get(id(weight), ()))

    def is_table(self, weight: Any) -> bool:
        """Return whether all stages that use a weight only look up rows of it."""
        return id(weight) in self._of_weight and id(weight) not in self._computes_with

    def parts_of_weight(self, weight: Any) -> list[int]:
        """Return the numbers of the parts of the model whose stages use a weight."""
        return sorted({self._part_of_stage[stage] for stage in self.of_weight(weight)})

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
            found.append([None if id(x) in bare else mask_of(x) for x in cut])
        return found

    def _refuse(self, model: Any) -> None:
        for layer in layers_of(model):
            if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
                raise ValueError(_STATEFUL.format(name=layer.name, model=model.name))


def part_of(weight: Any) -> int | None:
    """Return the part of a model whose ranks alone hold a weight; None if all ranks hold it."""
    return getattr(native(weight), "stage_part", None)


def _calls(nodes: Sequence[Any]) -> list[Call]:
    """Return the calls of a graph, for those who cut it."""
    place: dict[int, int] = {}
    found: list[Call] = []
    seen: set[int] = set()
    for i, node in enumerate(nodes):
        weights = {id(v): v for v in weights_of(node.operation)}
        cost = sum(math.prod(v.shape) for key, v in weights.items() if key not in seen)
        seen |= set(weights)
        needs = {place[id(x)] for x in node.input_tensors if id(x) in place}
        found.append(Call(node.operation.name, tuple(sorted(needs)), cost))
        place |= {id(symbol): i for symbol in node.outputs}
    return found
