"""``ScaleStrategy``: the class that users, tf.distribute and Keras call."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge import fit, installed
from tfscale.bridge.gradients import ending_with_their_graphs
from tfscale.bridge.installed import KERAS_2, refuse_tf_keras
from tfscale.bridge.objects import OPTIMIZERS
from tfscale.bridge.protocols import Optimizer
from tfscale.bridge.reading import shapes_apart
from tfscale.bridge.runtime import is_compiled_by_xla, ordered_by_device
from tfscale.bridge.tensorflow import DistributedValues, autograph_artifact
from tfscale.collectives.choose import Chooser
from tfscale.compression.method import Method
from tfscale.compression.policy import MethodPolicy, WirePolicy
from tfscale.exchange.collective_schedules import Algorithm
from tfscale.exchange.explain import Explanation, rows
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.scaling import Scaling
from tfscale.native import memory
from tfscale.native.group import DEFAULT_JOIN_TIMEOUT, DEFAULT_SLOW_AFTER
from tfscale.parallel.grid import Grid
from tfscale.parallel.pipeline import Pipeline
from tfscale.parallel.table import Table
from tfscale.strategy import building, keras2_applying, making, origin, randomness, steps
from tfscale.strategy.batch import predictions
from tfscale.strategy.batch.balance import Balance
from tfscale.strategy.changed import GradientVariables
from tfscale.strategy.extended import Extended
from tfscale.strategy.grid.parts import Copies
from tfscale.strategy.grid.teams import GridTeams
from tfscale.strategy.losses.own_losses import part_of_mean
from tfscale.strategy.pipeline.pipelined import Pipelined
from tfscale.strategy.rounds.rounds import Rounds
from tfscale.strategy.settings import DEADLINE, checked
from tfscale.strategy.shards.layouts import layouts
from tfscale.strategy.shards.sharding import Sharding
from tfscale.strategy.statistics import before_and_all
from tfscale.strategy.step import this_step
from tfscale.strategy.workers import join
from tfscale.support.garbage import without_collection
from tfscale.sync import Rule

_summing = keras2_applying.summing if KERAS_2 else steps.summing


class ScaleStrategy(tf.distribute.MultiWorkerMirroredStrategy, Scaling):
    r"""Strategy that trains one model on several devices, of one host or of several hosts.

    Each replica computes the gradients of its part of the global batch, an all-reduce
    sums them over all replicas, and every replica applies the same sum. With lossless
    wires, the result is equal, up to rounding, to that of one device with the whole batch.
    This includes clipping, accumulation, averages of weights, batch normalization, masked
    and weighted losses, and uneven batches.

    Args:
        algorithm: the schedule of all-reduces: a name (``"ring"``, ``"tree"``, ``"halving"``,
            ``"direct"``, ``"hierarchical"``, ``"central"``), a ``Schedule``, a function from a
            number of ranks to one, or ``"auto"``, which measures the links and chooses.
        wire: the format in which gradients are sent: a name (``"fp32"``, ``"bf16"``, ``"fp16"``,
            ``"fp8"``, ``"int8"``, ``"int4"``, ``"ternary"``, ``"sign"``), a mapping from
            patterns of variables' paths to names, or a ``WirePolicy``; by default ``"fp32"``.
        devices: names of the devices that this process uses, such as ``["GPU:0", "GPU:1"]``;
            by default all GPUs, or all logical CPUs if there is no GPU.
        cluster_resolver: lists the workers; by default ``TF_CONFIG``, or what Slurm, ``mpirun`` or
            ``torchrun`` has set for this process. All workers must have the same devices.
        sync: the rule that says when replicas agree: after every step, which is the default, or
            another rule of ``tfscale.sync``, such as ``DiLoCo(every=100, wire="int8")``.
        method: the method that sums gradients, instead of ``wire``: a method of
            ``tfscale.compression``, such as ``PowerSGD(rank=4)``, a mapping from patterns of
            variables' paths to methods or wires' names, or a ``MethodPolicy``.
        error_feedback: whether the rounding error on ``wire`` in one step is added to the
            gradients of the next step; by default on wires of less than 8 bits.
        bucket_bytes: the number of bytes of gradients that share an all-reduce, as a number or
            a text such as ``"25MB"``; by default computed from the measured links.
        batch_norm: ``"synchronized"`` for statistics of the global batch, as on one device;
            or ``"local"`` for statistics of each replica's samples, which need no communication
            in the forward pass. Moving statistics are the same on all replicas in both cases.
        own_losses: the kind of loss that your own ``train_step`` or ``compute_loss`` computes
            without Keras's loss objects: a ``"mean"`` over the replica's samples, a ``"sum"``
            over them, or ``"scaled"``: already divided by the size of the global batch. By
            default such a loss is treated as a mean, with a warning.
        shard: ``"optimizer"`` shares out the optimizer's state: each replica holds and updates a
            part of it. ``"all"`` shares out the weights, too: layers gather what they compute with.
            The result is the same. See docs/large-models.md.
        weights_wire: the format in which ``shard="optimizer"`` sends updated weights: ``"fp32"``,
            which is the default, or ``"bf16"``, or what else ``wire`` may be with these names. With
            ``"bf16"`` replicas compute with rounded weights, and keep exact ones in parts.
        grid: how replicas share one model: ``tfscale.Grid(tensor=2)`` makes teams of two replicas
            that hold one model together; by default each replica holds a whole model. A mapping of
            its fields does, too: ``{"tensor": 2}``.
        tensor: which weights the replicas of a team hold in slices: a mapping from patterns of
            weights' paths to ``"columns"``, ``"rows"``, ``"heads"`` or ``"vocabulary"``; or, for
            convolutions, along which axis activations are cut: ``"height"``, ``"width"``,
            ``"depth"`` or ``"length"``. See docs/large-models.md.
        pipeline: how a model is cut into the stages of the grid, and in which order they take
            microbatches: a ``tfscale.Pipeline``, or a mapping of its fields. See
            docs/large-models.md.
        shares: which part of the rows of each batch a replica takes: ``[3, 1]``, one number for
            each replica, or ``{"worker:1": 0.5}``, a number for each replica of a worker, where all
            others have 1; or ``"auto"``, which measures steps, so that all replicas finish
            together. By default all take equally many rows. The result is the same. See
            docs/strategy.md.
        schedule_file: a file that ``strategy.dump`` has written and you may have edited;
            ``"auto"`` then follows the file and measures nothing.
        deadline: the number of seconds without any progress after which an exchange fails.
        slow_after: the number of seconds after which a warning names the workers that are late;
            0 for no warnings.
        join_timeout: the number of seconds that workers wait for each other at the start. After
            10 s, and then every 30 s, each worker logs which workers it waits for.
        transport: the transport of gradients. ``"sockets"``: memory within a process, shared
            memory within a host, TCP between hosts; ``"grpc"``: TensorFlow's gRPC; ``"auto"``:
            sockets if all workers can connect, else gRPC, with a warning that says why.
        backend: the collectives that sum gradients. ``"engine"``: tfscale's collectives, with all
            features of this class; ``"tensorflow"``: TensorFlow's collectives, which are NCCL
            between GPUs and a ring on CPUs, for the wires fp32, bf16 and fp16; ``"auto"``:
            TensorFlow's if replicas are on GPUs and you ask for no feature that they lack, else
            tfscale's.

    Example:
        >>> strategy = tfscale.ScaleStrategy(wire="bf16")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        ...     model.compile("adam", "mse")
        >>> history = model.fit(x, y, batch_size=64, verbose=0)  # batch_size is the global batch
    """

    def __init__(
        self,
        algorithm: Algorithm = "auto",
        wire: str | Mapping[str, str] | WirePolicy | None = None,
        devices: Sequence[str] | None = None,
        cluster_resolver: Any = None,
        *,
        sync: Rule | None = None,
        method: Method | Mapping[str, Method | str] | MethodPolicy | None = None,
        error_feedback: bool | None = None,
        bucket_bytes: int | str | None = None,
        batch_norm: str = "synchronized",
        own_losses: str | None = None,
        shard: str | None = None,
        weights_wire: str | Mapping[str, str] | WirePolicy | None = None,
        grid: Grid | Mapping[str, int] | None = None,
        tensor: Mapping[str, str] | None = None,
        pipeline: Pipeline | Mapping[str, Any] | None = None,
        shares: str | Sequence[float] | Mapping[str, float] | None = None,
        schedule_file: str | Path | None = None,
        deadline: float = DEADLINE,
        slow_after: float = DEFAULT_SLOW_AFTER,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        transport: str = "auto",
        backend: str = "auto",
    ) -> None:
        installed.check()
        settings = checked(
            algorithm=algorithm, wire=wire, devices=devices, cluster_resolver=cluster_resolver,
            sync=sync, method=method, error_feedback=error_feedback, bucket_bytes=bucket_bytes,
            batch_norm=batch_norm, own_losses=own_losses, shard=shard, weights_wire=weights_wire,
            grid=grid, tensor=tensor, pipeline=pipeline, shares=shares,
            schedule_file=schedule_file, deadline=deadline, slow_after=slow_after,
            join_timeout=join_timeout, transport=transport, backend=backend,
        )  # fmt: skip
        self.sync, self.own_losses = settings.sync, own_losses
        self.synchronizes_batch_norm = batch_norm == "synchronized"
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.kept = GradientVariables()
        self.rounds: Rounds | None = None
        self.sharding: Sharding | None = None
        self.teams: GridTeams | None = None
        self.parts = Copies()
        self.balance: Balance | None = None
        tf.distribute.Strategy.__init__(self, Extended(self, settings))
        settings = making.join_workers(self.extended, settings)
        parts = making.make_reducers(self, settings)
        self.reducer, self.move_reducer, self.curvature_reducer, self.sharding, self.rounds = parts
        self.teams, self.parts = making.make_parts(self, settings)
        if (shares := self.extended.shares) is not None and shares.is_measured:
            self.balance = Balance(
                shares, self.extended.team, self.extended.devices, self.sync.bound
            )

    @property
    def pipeline(self) -> Pipelined | None:
        """The stages of models, which can be printed, drawn and simulated; None without stages."""
        return self.parts if isinstance(self.parts, Pipelined) else None

    @property
    def reducers(self) -> list[Reducer]:
        """Reducers of gradients, of those that move weights within a step, and of measured
        curvature; of weights, if state is sharded; and of the means at the ends of rounds, if there
        are rounds.
        """
        every = [self.reducer, self.move_reducer, self.curvature_reducer]
        if self.sharding is not None:
            every.append(self.sharding.spreader)
        return every if self.rounds is None else [*every, self.rounds.reducer]

    @property
    def num_replicas_in_sync(self) -> Any:
        """Number of replicas; in a step, division by it multiplies by the replica's share."""
        share = this_step().share
        return super().num_replicas_in_sync if share is None else share

    def scope(self) -> Any:
        """Return a context; models, optimizers and variables made in it belong to this strategy."""
        origin.refuse_other_scope(self)
        building.prepare_to_build(self)
        beginning = fit.begins()
        if beginning is not None:
            building.begin_fit(self, *beginning)
        return super().scope()

    @autograph_artifact
    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Call ``fn`` on every replica, with its part of each distributed argument."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(ending_with_their_graphs())
            if not tf.executing_eagerly():  # the step is traced, and the graph's objects stay
                stack.enter_context(without_collection())
            if self.extended.number_of_replicas == 1:
                return super().run(fn, args, kwargs, options)
            stack.enter_context(ordered_by_device())
            stack.enter_context(randomness.drawn_by_worker(self.extended))
            _refuse_xla(self)
            refuse_tf_keras(fn)
            step = fit.step_of(fn)
            if fit.predicts():
                fn = self.parts.prediction(fit.fitted(), fn)
                args = tf.nest.map_structure(
                    functools.partial(predictions.parts, self.extended), args
                )
                fn = steps.prediction_of_replica(self, fn)
                return predictions.joined(self, super().run(fn, args, kwargs, options))
            if step is None:
                stack.enter_context(_summing(self, self.optimizers))
                stack.enter_context(origin.named_by_us(self, OPTIMIZERS))
                if self.balance is not None:
                    self.balance.begin((args, kwargs))
                if not KERAS_2:
                    stack.enter_context(steps.loop_steps(self))
            else:
                fn = self.parts.step(step, fn)
                stack.enter_context(steps.hooks_of_step(self, step))
                fn = steps.step_of_replica(self, step, fn)
            return super().run(fn, args, kwargs, options)

    def part_of_mean(self, compute: Callable[[], Any]) -> Any:
        """Return a replica's mean loss over its rows as its part of the global batch's loss.

        Call this in a step of one of several replicas. A loss of Keras's loss objects is such a
        part already, and stays as it is. So does the loss of a step that adds up no losses.

        Args:
            compute: a function that returns the loss.
        """
        return part_of_mean(compute)

    def before_and_all(self, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return counts of the rows before a replica's in the global batch, and of all rows.

        Args:
            counts: counts of this replica's rows, as an int32 vector; a replica calls this.
        """
        return before_and_all(self.extended, counts)

    def figures_of_rounds(self) -> dict[str, Any]:
        """Return figures of the rounds, by name; none if replicas agree after every step."""
        return {} if self.rounds is None else self.rounds.figures()

    def shares_of_batch(self) -> list[float] | None:
        """Return which part of a batch's rows each replica takes; None if all parts are equal."""
        return None if self.extended.shares is None else self.extended.shares.now()

    def gathered_from_workers(self, numbers: np.ndarray) -> np.ndarray:
        """Return the arrays of all workers, which are of one shape; all workers call this."""
        return join.exchanged(self.extended.hosts, "steps of the workers", numbers)

    def seconds_behind(self) -> float:
        """Return how long this process has waited for sums in the background, in seconds."""
        return 0.0 if self.rounds is None else self.rounds.seconds_behind()

    @autograph_artifact
    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Reduce a per-replica value, or a structure of such values, to one value on the host."""
        nested = tf.nest.is_nested(value) and not isinstance(value, DistributedValues)
        if nested and axis is None and fit.wants_only_shapes():
            return tf.nest.map_structure(lambda v: self.experimental_local_results(v)[0], value)
        if nested:
            return tf.nest.map_structure(lambda v: self.reduce(reduce_op, v, axis), value)
        if isinstance(value, (int, float)):
            value = tf.constant(value)
        if self.rounds is not None and fit.trains():
            if fit.counts_batches():
                return self.rounds.of(fit.fitted()).count_batches(value)
            if fit.reduces_logs():
                return tf.reduce_mean(tf.stack(self.experimental_local_results(value)), 0)
        if axis is not None and _rank(value) == 0:
            axis = None  # Keras asks for the mean of scalars along their first axis
        return super().reduce(reduce_op, value, axis)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Give every replica its part of each batch of a dataset."""
        origin.refuse_other_scope(self)
        building.watch_seeds(self)  # before a callback restores them
        several = self.extended.number_of_replicas > 1
        give = super().experimental_distribute_dataset

        def distribute(whole: Any) -> Any:
            return give(whole, options) if several else whole

        distributed = distribute(dataset)
        shapes_apart(dataset, distributed, distribute)
        return distributed

    def explain(self) -> Explanation:
        """Return how gradients are sent: buckets, wires, schedules, bytes and times.

        The list is empty until a step has been traced.

        Returns:
            A list of rows; ``print`` and notebooks show it as a table.
        """
        team = self.extended.team
        every = [row for reducer in self.reducers for row in rows(reducer)]
        more = {} if self.extended.on_gpus else {"memory": memory.words()}
        if self.rounds is not None:
            more |= {"rounds": self.rounds.words(), "title": self.rounds.title}
            every += self.rounds.sent_by_rules()
        if self.extended.shares is not None:
            more["shares"] = self.extended.shares.words(self.balance and self.balance.changes)
        return Explanation(every, team.size, team.ways(), **more)

    def layouts(self) -> Table:
        """Return who holds which numbers of the weights and of the optimizers' slots, and why.

        The table is empty until an optimizer has been built, which Keras does before the first
        step.

        Returns:
            A list of rows; ``print`` shows it as a table, with bytes for each rank.
        """
        return layouts(self)

    def dump(self, path: str | Path) -> None:
        """Write what ``"auto"`` measured and chose; edit it and pass it as ``schedule_file``."""
        schedules = self.extended.team.schedules
        if not isinstance(schedules, Chooser):
            raise ValueError(
                "strategy.dump has no choices to write: the strategy has one replica, or its "
                'algorithm is not "auto". Call dump on a strategy of several replicas with '
                'algorithm="auto"'
            )
        self.reducer.trials.tell_chooser()
        schedules.dump(path)

    def __repr__(self) -> str:
        return f"<ScaleStrategy of {self.extended.number_of_replicas} replicas>"

    def born(self, optimizer: Optimizer) -> None:
        """Record an optimizer that has been made in this strategy's scope."""
        self.optimizers.add(optimizer)
        building.remember(self, optimizer)


def _refuse_xla(strategy: Any) -> None:
    """Raise if XLA compiles a step for several replicas, while the step is traced."""
    if not is_compiled_by_xla():
        return
    raise ValueError(
        f"jit_compile=True cannot train on {strategy.num_replicas_in_sync} replicas: XLA compiles "
        "a step for one device, and such a step cannot exchange gradients with other devices. "
        'Use jit_compile="auto" (or False): model.compile(..., jit_compile="auto").'
    )


def _rank(value: Any) -> Any:
    one = value.values[0] if isinstance(value, DistributedValues) else value
    return tf.convert_to_tensor(one).shape.rank
