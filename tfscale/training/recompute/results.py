"""A traced step's results as a graph, and what an order of that graph computes again.

A node of the forward pass is an operation whose result has several users or is needed by the
backward pass, together with all operations that only serve it. TensorFlow fuses an operation only
with the single user of its result, so copying whole nodes separates nothing that TensorFlow would
fuse. A node of the backward pass is a block of operations, and a block begins where a result of the
forward pass is first needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tfscale.training.recompute.graph import Graph, Node, Order, last_uses, memory
from tfscale.training.recompute.simulate import memory_with_rest
from tfscale.training.recompute.traced_step import (
    ALIASES,
    ORIGINAL,
    SHAPES,
    Again,
    Piece,
    TracedStep,
    Versions,
)


@dataclass(frozen=True)
class Event:
    """Nodes that are computed again together.

    Args:
        before: the node whose first use in the backward pass comes next.
        nodes: the nodes.
    """

    before: int
    nodes: tuple[int, ...]


class Results:
    """The nodes of a traced step."""

    def __init__(self, step: TracedStep) -> None:
        self._step = step
        self._ops = sorted({step.producer[home] for home in self._homes()})
        number = {op: i for i, op in enumerate(self._ops)}
        homes = (tensor for op in self._ops for tensor in step.ops[op].outputs)
        self._node_of = {
            home: number[step.producer[home]] for home in homes if self._may_be_lost(home)
        }

    def counts(self, units: Iterable[range]) -> list[int]:
        """Return how many nodes each unit has, given the units' operations."""
        return [sum(op in unit for op in self._ops) for unit in units]

    def _homes(self) -> Iterable[int]:
        """Yield the tensors that have several users, or one in the backward pass."""
        step = self._step
        users: dict[int, set[int]] = {}
        for index, op in enumerate(step.ops):
            if op.kind not in ALIASES and op.kind not in SHAPES:
                for tensor in op.inputs:
                    users.setdefault(step.tensors[tensor].home, set()).add(index)
        for home, each in users.items():
            if self._may_be_lost(home) and (len(each) > 1 or max(each) >= step.end):
                yield home

    def _may_be_lost(self, home: int) -> bool:
        step = self._step
        if step.producer[home] not in step.unit_of or step.tensors[home].home != home:
            return False
        kind = step.ops[step.producer[home]].kind
        return (
            not step.tensors[home].lasting and kind not in ALIASES and home not in self._kept_homes
        )

    @cached_property
    def _kept_homes(self) -> set[int]:
        """The tensors that stay because the backward pass needs an alias that stays."""
        step = self._step
        return {
            known.home
            for tensor, known in enumerate(step.tensors)
            if known.lasting and any(user >= step.end for user in step.consumers[tensor])
        }

    def _node(self, tensor: int) -> int | None:
        return self._node_of.get(self._step.tensors[tensor].home)

    def _is_lost(self, tensor: int) -> bool:
        """Return whether a tensor is no node's result and is not kept: its user makes it again."""
        step = self._step
        known = step.tensors[tensor]
        if step.producer[tensor] not in step.unit_of or known.lasting:
            return False
        home_lasts = step.tensors[known.home].lasting or known.home in self._kept_homes
        return not home_lasts and step.producer[known.home] in step.unit_of

    # ------------------------------------------------------------ operations

    def again(self, events: Sequence[Event]) -> tuple[Again, ...]:
        """Return the operations that events compute again, sorted by time."""
        begin = {event: self._first_use(event.before) for event in events}
        events = sorted((event for event in events if begin[event] >= 0), key=begin.__getitem__)
        holds = [Again((), frozenset(self._tensors_of(event)), begin[event]) for event in events]
        versions = Versions(holds)
        wanted: list[set[int]] = [set() for _ in events]
        for index in range(self._step.end, len(self._step.ops)):
            for tensor in self._inputs(index):
                version = versions.for_op(index, self._step.tensors[tensor].home)
                if version != ORIGINAL:
                    wanted[version].add(tensor)
        found = []
        for number in reversed(range(len(events))):
            ops = self._ops_for(wanted, versions, number)
            taken = {t for op in ops for t in self._step.ops[op].outputs if self._is_lost(t)}
            if ops:
                found.append(Again(tuple(sorted(ops)), frozenset(taken), holds[number].before))
        return tuple(reversed(found))

    def _tensors_of(self, event: Event) -> list[int]:
        chosen = set(event.nodes)
        return [home for home, node in self._node_of.items() if node in chosen]

    def _inputs(self, index: int) -> Iterable[int]:
        """Yield the nodes' results that an operation takes, as tensors."""
        op = self._step.ops[index]
        if op.kind in SHAPES:
            return
        for tensor in op.inputs:
            if self._node(tensor) is not None and self._is_lost(tensor):
                yield tensor

    def _ops_for(self, wanted: list[set[int]], versions: Versions, number: int) -> set[int]:
        """Return the operations that an event needs, and ask earlier events for their results."""
        step, needed = self._step, set[int]()
        waiting = [step.producer[tensor] for tensor in wanted[number]]
        while waiting:
            index = waiting.pop()
            if index in needed:
                continue
            needed.add(index)
            for tensor in step.ops[index].inputs:
                if not self._is_lost(tensor):
                    continue
                home = step.tensors[tensor].home
                version = versions.for_copy(number, home)
                if self._node(tensor) is None or version == number:
                    waiting.append(step.producer[tensor])
                elif version != ORIGINAL:
                    wanted[version].add(tensor)
        return needed

    def _first_use(self, node: int) -> int:
        """Return the first operation of the backward pass that needs a node; -1 if none does."""
        return self._first_uses.get(node, -1)

    @cached_property
    def _first_uses(self) -> dict[int, int]:
        result: dict[int, int] = {}
        for index in range(self._step.end, len(self._step.ops)):
            for tensor in self._inputs(index):
                node = self._node(tensor)
                if node is not None:
                    result.setdefault(node, index)
        return result

    # ----------------------------------------------------------------- graph

    @cached_property
    def openers(self) -> list[int]:
        """The nodes that open blocks of the backward pass; each block has one."""
        by_op: dict[int, int] = {}
        for node, op in sorted(self._first_uses.items()):
            by_op.setdefault(op, node)
        return [by_op[op] for op in sorted(by_op)]

    def graph(self, pile_up: bool = False) -> Graph:
        """Return the graph whose nodes are the results, and then the blocks of the backward pass.

        Args:
            pile_up: whether all gradients stay until the last one exists.
        """
        return _Measured(self, self._step, pile_up).graph()

    def events(self, order: Order) -> tuple[Event, ...]:
        """Return the events of an order of the graph."""
        count, found, waiting = len(self._ops), [], []
        done = 0
        for number in order:
            if number < done:
                waiting.append(number)
                continue
            done = number + 1
            if waiting:
                found.append(Event(self.openers[number - count], tuple(waiting)))
                waiting = []
        return tuple(found)

    def order(self, again: Sequence[Again]) -> Order:
        """Return the order of the graph that computes again what these operations do."""
        count = len(self._ops)
        starts = [self._first_use(node) for node in self.openers]
        order = list(range(count))
        for block, start in enumerate(starts):
            stop = starts[block + 1] if block + 1 < len(starts) else len(self._step.ops)
            now = [one for one in again if start <= one.before < stop]
            nodes = {self._node(tensor) for one in now for tensor in one.tensors}
            order += sorted(node for node in nodes if node is not None)
            order.append(count + block)
        return tuple(order)

    def ops_of(self, node: int) -> tuple[set[int], set[int]]:
        """Return the operations that compute a node, and the nodes that they need."""
        step, ops, needs = self._step, set[int](), set[int]()
        waiting = [self._ops[node]]
        while waiting:
            index = waiting.pop()
            ops.add(index)
            for tensor in step.ops[index].inputs:
                if not self._is_lost(tensor):
                    continue
                need = self._node(tensor)
                if need is None or need == node:
                    waiting.append(step.producer[tensor])
                elif step.producer[tensor] not in ops:
                    needs.add(need)
        return ops, needs

    def blocks(self) -> list[tuple[range, set[int]]]:
        """Return the operations of each block of the backward pass, and the nodes that it needs."""
        starts = [self._first_use(node) for node in self.openers]
        starts[:1] = [self._step.end] if starts else []
        stops = [*starts[1:], len(self._step.ops)] if starts else []
        result = []
        for start, stop in zip(starts, stops, strict=True):
            ops = range(start, stop)
            taken = (self._node(tensor) for index in ops for tensor in self._inputs(index))
            result.append((ops, {node for node in taken if node is not None}))
        return result

    def size(self, node: int) -> int:
        """Return the bytes of a node's results."""
        outputs = self._step.ops[self._ops[node]].outputs
        return sum(self._step.tensors[t].size for t in outputs if t in self._node_of)

    def op(self, node: int) -> int:
        """Return the operation of a node."""
        return self._ops[node]

    def __len__(self) -> int:
        return len(self._ops)


class _Measured:
    """The sizes and costs of a step's nodes, from the simulation of the step's operations."""

    def __init__(self, results: Results, step: TracedStep, pile_up: bool) -> None:
        self._results = results
        self._step = step
        self._live, self._rest = memory_with_rest(step, pile_up)

    def graph(self) -> Graph:
        step, count = self._step, len(self._results)
        nodes = [self._forward(node) for node in range(count)]
        blocks = self._results.blocks()
        last = {}
        for number, (_, needs) in enumerate(blocks):
            previous = (count + number - 1,) if number else ()
            nodes.append(Node(0.0, 0.0, (*sorted(needs), *previous), once=True))
            last[count + number] = needs
        spans = self._spans(blocks)
        plain = Graph(tuple(nodes), first_again=count)
        held = memory(plain, plain.plain).tolist()
        lives = [max(self._live[i] for i in span) for span in spans]
        fixed = max(0.0, self._live[step.end - 1] - held[count - 1])
        return self._with_extras(plain, held, lives, fixed, blocks)

    def _forward(self, node: int) -> Node:
        ops, needs = self._results.ops_of(node)
        cost = sum(self._step.ops[index].cost for index in ops)
        return Node(cost, self._results.size(node), tuple(sorted(needs)))

    def _spans(self, blocks: Sequence[tuple[range, set[int]]]) -> list[range]:
        """Return the moments of each node: the operations from the node before it up to its own."""
        spans, begin = [], self._step.begin
        for node in range(len(self._results)):
            spans.append(range(begin, self._results.op(node) + 1))
            begin = self._results.op(node) + 1
        if blocks:
            spans += [ops for ops, _ in blocks[:-1]]
            spans.append(range(blocks[-1][0].start, len(self._live)))
        return spans

    def _with_extras(
        self,
        plain: Graph,
        held: Sequence[float],
        lives: Sequence[float],
        fixed: float,
        blocks: Sequence[tuple[range, set[int]]],
    ) -> Graph:
        """Return the graph with gradients as the blocks' sizes, and all else as extra bytes."""
        count, nodes = len(self._results), list(plain.nodes)
        last = last_uses(plain, plain.plain)
        before = 0.0
        for number, node in enumerate(nodes):
            extra = max(0.0, lives[number] - held[number] - fixed)
            size, cost = node.size, node.cost
            if number >= count:
                ops = blocks[number - count][0]
                cost = sum(self._step.ops[index].cost for index in ops)
                size = 0.0
                if number + 1 < len(nodes):
                    stay = held[number] - sum(
                        nodes[i].size for i in range(count) if last[i] == number
                    )
                    size = max(0.0, self._rest[ops.stop - 1] - stay - fixed)
                extra = max(0.0, extra - before - size)
                before = size
            nodes[number] = Node(cost, size, node.needs, extra, node.once)
        return Graph(tuple(nodes), fixed, count)


def has_same_results(step: TracedStep, other: TracedStep, pieces: Sequence[Piece]) -> bool:
    """Return whether two traces of a model have as many results in each unit.

    The kinds of results may differ: for batches of unknown size TensorFlow transposes and reshapes
    more often.

    Args:
        step: one trace.
        other: the other trace.
        pieces: the other trace's pieces of units.
    """
    own = [range(unit.start, unit.stop) for unit in step.units]
    units = [ops_of(unit.pieces, pieces) for unit in step.units]
    return Results(step).counts(own) == Results(other).counts(units)


def ops_of(part: range, pieces: Sequence[Piece]) -> range:
    """Return the operations of consecutive pieces."""
    return range(pieces[part.start].start, pieces[part.stop - 1].stop)
