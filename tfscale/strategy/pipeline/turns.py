"""Turns of a replica: forward and backward passes of its stages, for one microbatch each.

A rank's turns follow each other because each waits for what the turn before it has computed. No
turn waits for a message that an earlier turn has sent: the receiver may first need a later turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.graphs import next_number
from tfscale.bridge.models import added_losses_of
from tfscale.bridge.objects import copy_of, mask_of, with_mask
from tfscale.exchange.team import Team
from tfscale.plan.pipelines import Turn, Work
from tfscale.plan.pipelines.order import Transfer
from tfscale.strategy.batch.rows import joined_rows, number_of_rows
from tfscale.strategy.pipeline.gradients import Accumulated
from tfscale.strategy.pipeline.late import put_off
from tfscale.strategy.pipeline.stages import Stages
from tfscale.strategy.share import Share
from tfscale.strategy.step import Step, during, this_step
from tfscale.strategy.step_graph import StepGraph


@dataclasses.dataclass
class Passed:
    """Record that a forward pass leaves for the backward pass.

    Attributes:
        tape: tape that has recorded the pass.
        received: tensors from the stage before, in the order of the boundary.
        targets: tensors that go to the next stage; the loss in the last stage.
        added: losses that the stage's layers have added; None for the last stage.
    """

    tape: tf.GradientTape
    received: list[tf.Tensor]
    targets: list[tf.Tensor]
    added: tf.Tensor | None = None


@dataclasses.dataclass
class Late:
    """Gradients of weights that a backward pass leaves for a later turn.

    Attributes:
        weights: weights of the stage.
        gradients: their gradients.
        back: gradients of what the stage has received, from the same pass.
        begin: number of the pass's first operation.
    """

    weights: Sequence[Any]
    gradients: Sequence[Any]
    back: list[tf.Tensor]
    begin: int


class Microbatches:
    """The parts of a replica's rows of a batch.

    Args:
        data: structure of tensors with rows.
        number: number of microbatches.
    """

    def __init__(self, data: Any, number: int) -> None:
        self.data, self.number = data, number
        first = next(x for x in tf.nest.flatten(data) if x is not None)
        # The graph must not know the number: it would compute divisors of losses, such as the rows
        # of a microbatch, and a constant does not show what it counts.
        rows = number_of_rows(first)
        self.rows = tf.compat.v1.placeholder_with_default(rows, [])
        self._parts: dict[int, Any] = {}

    def bounds(self, i: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the first row of a microbatch, and the first row after it."""
        return self.rows * i // self.number, self.rows * (i + 1) // self.number

    def size(self, i: int) -> tf.Tensor:
        """Return the number of rows of a microbatch; it may be 0."""
        begin, end = self.bounds(i)
        return end - begin

    def part(self, i: int) -> Any:
        """Return the rows of a microbatch; one that has none gets a row that does not count."""
        if i not in self._parts:
            begin, end = self.bounds(i)
            rows = tf.range(begin, tf.maximum(end, begin + 1))
            self._parts[i] = tf.nest.map_structure(
                lambda x: None if x is None else _at(rows, x), self.data
            )
        return self._parts[i]

    def rows_of(self, numbers: Sequence[int]) -> Any:
        """Return the rows of some microbatches; one that has none gives none."""
        ranges = [tf.range(*self.bounds(i)) for i in numbers]

        def joined(x: Any) -> Any:
            return None if x is None else joined_rows([_at(rows, x) for rows in ranges])

        return tf.nest.map_structure(joined, self.data)

    def step(self, step: Step, numbers: Sequence[int], received: Sequence[tf.Tensor] = ()) -> Step:
        """Return the step of one replica for some microbatches.

        Args:
            step: the step for all rows of the replica.
            numbers: numbers of the microbatches.
            received: tensors from the stage before, which have the rows of the microbatches.
        """
        assert step.rows is not None
        rows = step.rows.of_microbatch(tf.add_n([self.size(i) for i in numbers]))
        share = step.share
        if share is not None:
            share = Share(int(share), rows.local, rows.total, copies=share.copies)
        is_microbatch = len(numbers) < self.number
        graph = StepGraph(([self.part(i) for i in numbers], list(received)))
        return dataclasses.replace(
            step, rows=rows, share=share, graph=graph, is_microbatch=is_microbatch
        )

    def joined(self, outputs: Mapping[int, Any]) -> Any:
        """Return outputs of microbatches by their numbers, without rows that do not count."""
        numbers = sorted(outputs)
        sizes = [self.size(i) for i in numbers]

        def own(x: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
            # An output may have several rows for each row of the microbatch.
            of_row = tf.shape(x, size.dtype)[0] // tf.maximum(size, 1)
            return x[: size * of_row]

        def whole(*parts: tf.Tensor) -> tf.Tensor:
            found = tf.concat(list(map(own, parts, sizes)), 0)
            masks = [mask_of(x) for x in parts]
            if masks[0] is None:
                return found
            return with_mask(found, tf.concat(list(map(own, masks, sizes)), 0))

        return tf.nest.map_structure(whole, *(outputs[i] for i in numbers))


class Turns:
    """The turns of one replica in one step, as they are traced.

    Args:
        stages: stages of the model.
        program: what the rank does: turns and transfers, in order.
        microbatches: the replica's rows, in parts.
        team: team of the replicas that hold the stages.
        replica: index of the replica in this process.
        training: whether layers train.
        judge: function of a microbatch's number and outputs that the last stage calls for the
            loss; None for predictions.
        counts: whether metrics of layers count here: of the replicas of a stage, one counts.
        scaled: function that multiplies a loss by the optimizer's loss scale.

    Attributes:
        gradients: gradients that the turns have computed.
        outputs: outputs of the last stage, by microbatch.
        losses: losses of all microbatches, added losses included.
    """

    def __init__(
        self,
        stages: Stages,
        program: Sequence[Turn | Transfer],
        microbatches: Microbatches,
        team: Team,
        replica: int,
        training: bool,
        judge: Callable[[int, Any], tf.Tensor] | None,
        counts: bool,
        scaled: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
    ) -> None:
        self._stages, self._program, self._microbatches = stages, program, microbatches
        self._team, self._replica, self._training = team, replica, training
        self._judge, self._counts, self._scaled = judge, counts, scaled
        self.gradients = Accumulated()
        self.outputs: dict[int, Any] = {}
        self.losses: list[tf.Tensor] = []
        self._passed: dict[tuple[int, int], Passed] = {}
        # Tensors of a stage and microbatch, as they come from a neighbour or from this rank.
        self._forward: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._backward: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._late: dict[tuple[int, int], Late] = {}
        model = stages.graph.model
        self._trainable = model.trainable_variables

    def run(self) -> None:
        """Trace all turns of the rank, and the messages between them."""
        after: list[tf.Tensor] = []
        for one in self._program:
            with tf.control_dependencies(after):
                if isinstance(one, Transfer):
                    (self._send if one.sends else self._receive)(one)
                elif one.work is Work.FORWARD:
                    after = self._pass_forward(one)
                elif one.work is Work.BACKWARD_WEIGHT:
                    after = self._add_late(one, after)
                else:
                    after = self._pass_back(one)

    def weights(self, stage: int) -> list[Any]:
        """Return the trainable weights of a stage."""
        return [v for v in self._trainable if stage in self._stages.of_weight(v)]

    # -- passes

    def _pass_forward(self, turn: Turn) -> list[tf.Tensor]:
        stage, i = turn.stage, turn.microbatch
        received = self._forward.pop((i, stage - 1), [])
        step = self._microbatches.step(this_step(), [i], received)
        with during(step), tf.GradientTape(watch_accessed_variables=self._training) as tape:
            watched = [x for x in received if x.dtype.is_floating]
            tape.watch(watched)
            own = self._microbatches.part(i)
            with during(dataclasses.replace(step, counts=self._counts)):
                found = self._stages.graph.run(
                    self._stages.nodes[stage], self._known(stage, own, received), self._training
                )
            passed = self._end(stage, i, found, tape, watched)
        if self._training:
            self._passed[i, stage] = passed
        return [*passed.targets, *([] if passed.added is None else [passed.added])]

    def _known(self, stage: int, own: Any, received: list[tf.Tensor]) -> dict[int, tf.Tensor]:
        graph = self._stages.graph
        inputs = graph.standardized(own[0])
        known = {id(symbol): x for symbol, x in zip(graph.inputs, inputs, strict=True)}
        if stage:
            came = self._stages.boundaries[stage - 1]
            known |= {id(symbol): x for symbol, x in zip(came, received, strict=True)}
        return known

    def _end(
        self,
        stage: int,
        i: int,
        found: dict[int, tf.Tensor],
        tape: tf.GradientTape,
        received: list[tf.Tensor],
    ) -> Passed:
        """Give the results of a forward pass to who needs them."""
        graph, stages = self._stages.graph, self._stages
        with self._regularizing(stage):
            if stage == stages.number - 1:
                output = self.outputs[i] = graph.packed([found[id(x)] for x in graph.outputs])
                if self._judge is None:
                    return Passed(tape, received, tf.nest.flatten(output))
                loss = self._judge(i, output)
                self.losses.append(loss)
                return Passed(tape, received, [self._scaled(loss)])
            out = [copy_of(found[id(x)]) for x in stages.boundaries[stage]]
            self._forward[i, stage] = out
            every = [] if self._judge is None else added_losses_of(graph.model)
            if not every:
                return Passed(tape, received, out)
            added = tf.add_n(every)
            self.losses.append(added)
            return Passed(tape, received, out, self._scaled(added))

    def _pass_back(self, turn: Turn) -> list[tf.Tensor]:
        stage, i = turn.stage, turn.microbatch
        passed, weights = self._passed.pop((i, stage)), self.weights(stage)
        targets, slopes = passed.targets, None
        if stage < self._stages.number - 1:
            targets = [x for x in targets if x.dtype.is_floating]
            slopes = self._backward.pop((i, stage + 1))
            if passed.added is not None:
                targets, slopes = [*targets, passed.added], [*slopes, tf.ones_like(passed.added)]
        sources = [*passed.received, *weights]
        begin = next_number(tf.compat.v1.get_default_graph())
        with during(self._microbatches.step(this_step(), [i])):
            found = passed.tape.gradient(targets, sources, slopes) if sources else []
        back, own = found[: len(passed.received)], found[len(passed.received) :]
        back = [
            tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
            for x, g in zip(passed.received, back, strict=True)
        ]
        self._backward[i, stage] = back
        if turn.work is Work.BACKWARD_INPUT:
            self._late[i, stage] = Late(weights, own, back, begin)
            return back or list(slopes or targets)
        self.gradients.add(stage, weights, own)
        return [*self.gradients.tensors(), *back] or list(slopes or targets)

    def _add_late(self, turn: Turn, after: list[tf.Tensor]) -> list[tf.Tensor]:
        """Add the gradients of weights that an earlier turn has left for this one."""
        late = self._late.pop((turn.microbatch, turn.stage))
        put_off(late.gradients, late.back, late.begin, after)
        self.gradients.add(turn.stage, late.weights, late.gradients)
        return self.gradients.tensors() or after

    def _regularizing(self, stage: int) -> Any:
        """Return a context in which the model regularizes the weights of one stage."""

        def own(_: Any, model: Any) -> list[Any]:
            of_stage = [v for v in self.weights(stage) if self._stages.of_weight(v)[0] == stage]
            return [v.regularizer(v) for v in of_stage if v.regularizer is not None]

        model = self._stages.graph.model
        return hooks.REGULARIZATION_LOSSES.on(model, own, in_thread=True)

    # -- messages

    def _send(self, one: Transfer) -> None:
        stage, i = one.turn.stage, one.turn.microbatch
        if one.turn.work is not Work.FORWARD:
            for k, x in enumerate(self._backward.pop((i, stage))):
                self._move(x, one, _name("gradient", one, k))
            return
        symbols, masks = self._stages.boundaries[stage], self._stages.masks[stage]
        sent = zip(self._forward.pop((i, stage)), symbols, masks, strict=True)
        for k, (x, symbol, mask) in enumerate(sent):
            self._give(x, symbol, one, _name("activation", one, k))
            if mask is not None:
                self._give(_mask_or_all(x, mask), mask, one, _name("mask", one, k))

    def _receive(self, one: Transfer) -> None:
        stage, i = one.turn.stage, one.turn.microbatch
        if one.turn.work is not Work.FORWARD:
            sent = [x for x in self._passed[i, stage - 1].targets if x.dtype.is_floating]
            self._backward[i, stage] = [
                self._move(tf.zeros_like(x), one, _name("gradient", one, k))
                for k, x in enumerate(sent)
            ]
            return
        found = []
        symbols, masks = self._stages.boundaries[stage], self._stages.masks[stage]
        for k, (symbol, mask) in enumerate(zip(symbols, masks, strict=True)):
            x = self._take(symbol, one, _name("activation", one, k))
            if mask is not None:
                x = with_mask(x, self._take(mask, one, _name("mask", one, k)))
            found.append(x)
        self._forward[i, stage] = found

    def _give(self, x: tf.Tensor, symbol: Any, one: Transfer, name: str) -> None:
        if self._stages.shape_is_sent(symbol):
            self._move(tf.shape(x, tf.int64), one, f"shape of the {name}")
        self._move(x, one, name)

    def _take(self, symbol: Any, one: Transfer, name: str) -> tf.Tensor:
        """Receive a tensor of which the graph of the model says the type, and perhaps the shape."""
        if self._stages.shape_is_sent(symbol):
            spec = tf.TensorSpec([len(symbol.shape)], tf.int64)
            shape = self._move(spec, one, f"shape of the {name}")
        else:
            rows = tf.maximum(self._microbatches.size(one.turn.microbatch), 1)
            sides = [rows, *(tf.constant(side, tf.int64) for side in symbol.shape[1:])]
            shape = tf.stack(sides) if symbol.shape else ()  # a sum of all numbers has no rows
        x = self._move(tf.zeros(shape, symbol.dtype), one, name)
        x.set_shape([None, *symbol.shape[1:]] if symbol.shape else [])
        return x

    def _move(self, x: Any, one: Transfer, name: str) -> tf.Tensor:
        own = self._team.rank(self._replica)
        source, target = (own, one.peer) if one.sends else (one.peer, own)
        return self._team.transfer(self._replica, x, source, target, name)


def _name(what: str, one: Transfer, place: int) -> str:
    """Return the name of a message, which errors show: what it is, from where, and for which turn.

    Args:
        what: what is sent.
        one: the message.
        place: place of the tensor among those that cross one cut.
    """
    stage = one.turn.stage
    target = stage + 1 if one.turn.work is Work.FORWARD else stage - 1
    which = f" {place + 1}" if place else ""
    return f"{what}{which} of stage {stage} for stage {target}, microbatch {one.turn.microbatch}"


def _at(rows: tf.Tensor, x: Any) -> Any:
    """Return consecutive rows of a dense, sparse or ragged tensor."""
    if isinstance(x, tf.SparseTensor):
        begin = tf.concat([rows[:1], tf.zeros_like(x.dense_shape[1:])], 0)
        size = tf.concat([tf.size(rows, tf.int64)[tf.newaxis], x.dense_shape[1:]], 0)
        return tf.sparse.slice(x, begin, size)
    # A slice would look as if the number of rows depended on the data: see ``StepGraph``.
    return tf.gather(x, rows)


def _mask_or_all(x: tf.Tensor, symbol: Any) -> tf.Tensor:
    """Return a tensor's mask; one that leaves nothing out if a layer has taken the mask off."""
    mask = mask_of(x)
    return tf.ones(tf.shape(x)[: len(symbol.shape)], tf.bool) if mask is None else mask
