"""Models in stages: each replica trains those of its rank, and takes microbatches in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.fit import JUDGING, TRAINING, ModelStep
from tfscale.bridge.layers import variable_being_made
from tfscale.bridge.losses import loss_of_batch
from tfscale.bridge.models import overrides
from tfscale.bridge.objects import loss_tracker, metrics_of
from tfscale.bridge.protocols import Layer
from tfscale.bridge.tensorflow import replica_id
from tfscale.exchange.team import Team
from tfscale.parallel.grid import DATA, TENSOR
from tfscale.parallel.layout import Owned
from tfscale.parallel.pipeline import Pipeline, order_of_outputs, parts_of_ranks
from tfscale.plan.pipelines import Simulation, Times, Turn, Work, simulate
from tfscale.strategy.grid.parts import Copies, SplitWeights
from tfscale.strategy.grid.teams import GridTeams
from tfscale.strategy.losses.keras_losses import counting_variables
from tfscale.strategy.pipeline.gradients import StageGradients
from tfscale.strategy.pipeline.stages import Stages
from tfscale.strategy.pipeline.turns import Microbatches, Turns
from tfscale.strategy.pipeline.weights import StageWeight, give_to_stages, layout_of
from tfscale.strategy.placed import Placement, assign_part
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.step import Step, during, this_step

_OWN_METHODS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
_OWN = (
    "{name!r} ({kind}) has its own {methods}, and in a pipeline each replica runs a part of the "
    "model, so it cannot call them. Use Keras's methods, with losses and metrics in compile; or "
    "leave pipeline out"
)
_EAGER = (
    "{name!r} is compiled with run_eagerly=True, and the stages of a pipeline run at the same "
    "time, in a graph. Leave out run_eagerly"
)
_BUILT = (
    "the optimizer {optimizer!r} was built before {name!r} was cut into stages. Compile the model "
    "with an optimizer that is not built yet"
)
_NOTHING_TO_TRAIN = "all layers of {name!r} are frozen, so that a step changes no weight"
_NOT_BUILT = (
    "{name!r} is not built yet, so it cannot be cut into stages. Give it an input shape, for "
    "example by a first layer keras.Input(shape)"
)


class Pipelined(Copies):
    """Models in stages, of which each replica has those of its rank.

    ``print`` shows the order of turns, how long ranks are idle and how many activations they keep.

    Args:
        strategy: the strategy.
        teams: teams of the grid, with a team along the axis ``stages``.
        pipeline: how models are cut, and in which order stages take microbatches.
        slices: weights that the replicas of a stage hold in slices; None if none are.

    Attributes:
        order: for each rank its turns.
        of_stage: team of the replicas that hold the same stage.
    """

    def __init__(
        self,
        strategy: Strategy,
        teams: GridTeams,
        pipeline: Pipeline,
        slices: SplitWeights | None,
    ) -> None:
        assert teams.stages is not None
        self.order = pipeline.order_of(teams.grid.stages)
        self._parts = parts_of_ranks(self.order)
        super().__init__(StageGradients(teams, self._parts))
        self._slices = slices
        self._extended, self._teams, self._pipeline = strategy.extended, teams, pipeline
        self._scope = strategy.scope
        self._team: Team = teams.stages
        self._judging = order_of_outputs(self.order)
        self.of_stage = teams.twins(DATA, TENSOR).team or Team(None, teams.everybody.schedules)
        self._cut: weakref.WeakKeyDictionary[Any, Stages] = weakref.WeakKeyDictionary()

    # -- models

    def take(self, model: Any) -> None:
        """Cut a model into stages, and leave its weights on their stages' replicas.

        A model that is not built yet is left for later.
        """
        if not model.built or self._is_cut(model):
            return
        stages = Stages(model, self._pipeline, self.order)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and optimizer.built:
            raise ValueError(_BUILT.format(optimizer=optimizer.name, name=model.name))
        give_to_stages(model, stages, self._teams.grid)
        self._cut[model] = stages

    def _is_cut(self, model: Any) -> bool:
        return model in self._cut and self._cut[model].are_of(model)

    def stages_of(self, model: Any) -> Stages:
        """Return the stages of a model, which is cut now if it is not cut yet.

        Raises:
            ValueError: the model cannot be cut.
        """
        own = [name for name in _OWN_METHODS if overrides(model, name)]
        if own:
            words = {"name": model.name, "kind": type(model).__name__, "methods": ", ".join(own)}
            raise ValueError(_OWN.format(**words))
        if model.run_eagerly:
            raise ValueError(_EAGER.format(name=model.name))
        if not self._is_cut(model):
            if not model.built:
                raise ValueError(_NOT_BUILT.format(name=model.name))
            with tf.init_scope(), self._scope():
                self.take(model)
        return self._cut[model]

    def placement(self, beside: Any) -> Placement | None:
        """See ``Copies``."""
        made = variable_being_made()
        if made is not None and isinstance(beside, StageWeight):
            inner = beside.layout.inner
            assert isinstance(inner, Owned)
            hooks.ASSIGN_SLOT.put(made, assign_part, weakly=True)
            grid, shape = self._teams.grid, tuple(made.shape)
            return Placement(layout_of(grid, self._parts, shape, inner.owner))
        return None if self._slices is None else self._slices.placement(beside)

    @contextlib.contextmanager
    def computing(self, model: Any, layers: Sequence[Layer]) -> Iterator[None]:
        """See ``Copies``."""
        if self._slices is None:
            yield
            return
        with self._slices.computing(model, layers, in_turns=True):
            yield

    # -- steps

    def step(self, step: ModelStep, of_keras: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a replica does in a step of training or evaluation, in place of Keras."""
        stages, training = self.stages_of(step.model), step.kind == TRAINING

        def train_step(data: Any) -> Any:
            return self._step(stages, data, training)

        train_step.__name__ = TRAINING if training else JUDGING
        return train_step

    def prediction(self, model: Any, of_keras: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a replica does to predict, in place of Keras."""
        stages = self.stages_of(model)

        def predict_step(data: Any) -> Any:
            microbatches = Microbatches(_unpacked(data), self.order.microbatches)
            turns = self._turns(stages, microbatches, training=False)
            turns.run()
            return self._predicted(stages, microbatches, turns)

        return predict_step

    def _turns(
        self, stages: Stages, microbatches: Microbatches, training: bool, **more: Any
    ) -> Turns:
        replica = replica_id()
        order = self.order if training else self._judging
        program = list(order.program(self._team.rank(replica)))
        if not training:
            program = [one for one in program if _work_of(one) is Work.FORWARD]
        more = {"judge": None, "counts": self._counts(), **more}
        return Turns(stages, program, microbatches, self._team, replica, training, **more)

    def _step(self, stages: Stages, data: Any, training: bool) -> Any:
        model, microbatches = (
            stages.graph.model,
            Microbatches(_unpacked(data), self.order.microbatches),
        )

        def judge(i: int, outputs: Any) -> tf.Tensor:
            x, y, sample_weight = microbatches.part(i)
            more = {"sample_weight": sample_weight, "training": training}
            return loss_of_batch(model, x=x, y=y, y_pred=outputs, **more)

        optimizer = model.optimizer if training else None
        more = {} if optimizer is None else {"scaled": optimizer.scale_loss}
        turns = self._turns(stages, microbatches, training, judge=judge, **more)
        turns.run()
        self._count_loss(model, turns.losses)
        if training:
            self._update(stages, turns)
        if turns.outputs:
            x, y, sample_weight = microbatches.rows_of(sorted(turns.outputs))
            with during(self._counting(microbatches, turns)):
                model.compute_metrics(x, y, microbatches.joined(turns.outputs), sample_weight)
        return self._results(model)

    def _counting(self, microbatches: Microbatches, turns: Turns) -> Step:
        """Return the step in which metrics count the rows of which this replica has outputs."""
        step = microbatches.step(this_step(), sorted(turns.outputs))
        return dataclasses.replace(step, counts=self._counts())

    def _counts(self) -> bool:
        """Return whether a replica counts metrics: of those with slices of a stage, one does."""
        return self._teams.slice(replica_id()) == 0

    def _results(self, model: Any) -> Any:
        """Return the results of metrics over the rows that all ranks of a pipeline have counted."""
        held = [v for metric in metrics_of(model) for v in counting_variables(metric)]
        own = [tf.convert_to_tensor(v.value) for v in held]
        totals = self._team.sum_all(replica_id(), own, "metrics of stages")
        with keras.StatelessScope(list(zip(held, totals, strict=True))):
            return tf.nest.map_structure(tf.convert_to_tensor, model.get_metrics_result())

    def _count_loss(self, model: Any, losses: Sequence[tf.Tensor]) -> None:
        """Count the loss of a step, to which all stages may have added losses."""
        rows, tracker = this_step().rows, loss_tracker(model)
        assert rows is not None
        dtype = tf.as_dtype(tracker.dtype)
        own = tf.add_n([tf.zeros([], dtype), *(tf.cast(x, dtype) for x in losses)])
        loss = self._team.sum(replica_id(), own, "losses of stages")
        tracker.total.assign(tracker.total + loss * tf.cast(rows.total, dtype))
        tracker.count.assign(tracker.count + tf.cast(rows.local, dtype))

    def _update(self, stages: Stages, turns: Turns) -> None:
        """Apply the gradients of all microbatches."""
        model = stages.graph.model
        weights = model.trainable_variables
        if not weights:
            warnings.warn(_NOTHING_TO_TRAIN.format(name=model.name), stacklevel=2)
            return
        part = self._parts[self._team.rank(replica_id())]
        held = {id(v) for v in weights if part in stages.parts_of_weight(v)}
        tables = {id(v) for v in weights if stages.is_table(v)}
        gradients = turns.gradients.of_all(weights, held, tables)
        with during(dataclasses.replace(this_step(), stage=None)):
            model.optimizer.apply_gradients(zip(gradients, weights, strict=True))

    def _predicted(self, stages: Stages, microbatches: Microbatches, turns: Turns) -> Any:
        """Return the outputs; of a replica that does not have them, outputs without rows."""
        outputs = None
        if turns.outputs:
            outputs = tf.nest.flatten(microbatches.joined(turns.outputs))
        found = [
            self._or_no_rows(symbol, None if outputs is None else outputs[i])
            for i, symbol in enumerate(stages.graph.outputs)
        ]
        return stages.graph.packed(found)

    def _or_no_rows(self, symbol: Any, output: tf.Tensor | None) -> tf.Tensor:
        """Return an output; an array without rows, of the same other sizes, if there is none."""
        shape = [0, *symbol.shape[1:]]
        if None in shape:
            own = tf.zeros([len(shape)], tf.int32) if output is None else tf.shape(output)
            last = self.order.ranks - 1
            sent = self._team.broadcast(replica_id(), own, "shape of predictions", last)
            shape = tf.concat([[0], sent[1:]], 0)
        return tf.zeros(shape, symbol.dtype) if output is None else output

    # -- what it is

    def simulate(self, times: Times | None = None) -> Simulation:
        """Return when each turn begins and ends, if all stages take these times."""
        return simulate(self.order, times, boxes=True)

    def draw(self, times: Times | None = None) -> Any:
        """Plot the turns of all ranks in time, with the share of the time in which ranks wait.

        Args:
            times: times of one microbatch; by default a backward pass takes twice as long as a
                forward pass.
        """
        return self.order.draw(times)

    def __str__(self) -> str:
        seen, count = simulate(self.order), self.order.verify()
        lines = [
            f"{self.order.name}: {self.order.ranks} ranks, {self.order.stages} stages, "
            f"{self.order.microbatches} microbatches; a rank is idle for at most "
            f"{seen.idle_share:.0%} of the time",
        ]
        for rank, turns in enumerate(self.order.turns):
            shown = " ".join(f"{t.work.value}{t.microbatch}" for t in turns)
            lines.append(f"rank {rank}, at most {count.live[rank]} live: {shown}")
        return "\n".join(lines)


def _work_of(one: Any) -> Work:
    return one.work if isinstance(one, Turn) else one.turn.work


def _unpacked(data: Any) -> tuple[Any, Any, Any]:
    found: tuple[Any, Any, Any] = keras.utils.unpack_x_y_sample_weight(data)
    return found
