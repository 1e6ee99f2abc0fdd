"""``ScaleStrategy``: the class that users, tf.distribute and Keras call."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge import fit, installed, output, saving
from tfscale.bridge.callbacks import before_callbacks_get_their_model
from tfscale.bridge.installed import KERAS_2, refuse_tf_keras
from tfscale.bridge.objects import OPTIMIZERS
from tfscale.bridge.protocols import Optimizer
from tfscale.bridge.reading import shapes_apart
from tfscale.bridge.runtime import is_compiled_by_xla
from tfscale.bridge.tensorflow import (
    DistributedValues,
    PerReplica,
    autograph_artifact,
)
from tfscale.cluster.sources import ALL_BARS
from tfscale.collectives.choose import Chooser
from tfscale.collectives.registry import checked_algorithm
from tfscale.compression.method import Method
from tfscale.compression.policy import MethodPolicy, WirePolicy, policy_of
from tfscale.exchange import backends
from tfscale.exchange.collective_schedules import Algorithm, of_hosts, of_replicas
from tfscale.exchange.collective_schedules import bucket_bytes as suitable_bytes
from tfscale.exchange.explain import Explanation, rows
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.team import Team
from tfscale.exchange.tensorflow_team import TensorFlowTeam
from tfscale.exchange.trial import Trials
from tfscale.native import memory
from tfscale.native.group import (
    DEFAULT_JOIN_TIMEOUT,
    DEFAULT_SLOW_AFTER,
    checked_patience,
    checked_resolver,
)
from tfscale.native.transport import checked as checked_transport
from tfscale.strategy import (
    applying,
    backup,
    building,
    farewell,
    join,
    keras2_applying,
    origin,
    predictions,
    steps,
)
from tfscale.strategy.current import current
from tfscale.strategy.extended import Extended
from tfscale.strategy.own_losses import CHOICES, part_of_mean
from tfscale.strategy.rounds import Rounds
from tfscale.strategy.teams import Teams, size_of_teams
from tfscale.support import arguments, records
from tfscale.support.names import TIMELINE_VARIABLE
from tfscale.support.sizes import number_of_bytes
from tfscale.sync import EveryStep, Rule

DEADLINE = 120.0

_hooked = keras2_applying.hooked if KERAS_2 else applying.hooked

_NOTHING_TRAVELS = (
    "%s has no effect: there is one replica, so no gradients are sent. For several replicas "
    "use several GPUs, logical CPUs or workers"
)
_ONE_GROUP = (
    "%r has no effect: all %d replicas are of one group, and train as under EveryStep. Say how "
    "many make a group, such as group=1"
)
_GROUPS_OF_ONE = (
    "%r has no effect: it says how gradients are sent within groups, and with %r each has one "
    "replica"
)


class ScaleStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    r"""Strategy that trains one model on several devices, of one host or of several hosts.

    Each replica computes the gradients of its part of the global batch, an all-reduce
    sums them over all replicas, and every replica applies the same sum. With lossless
    wires, the result is equal, up to rounding, to that of one device with the whole batch.
    This includes clipping, accumulation, averages of weights, batch normalization, masked
    and weighted losses, and uneven batches.

    Args:
        algorithm: the schedule of all-reduces: a name (``"ring"``, ``"tree"``, ``"halving"``,
            ``"direct"``, ``"hierarchical"``, ``"central"``), a function from a number of
            ranks to a ``Schedule``, or ``"auto"``, which measures the links and chooses.
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
        schedule_file: str | Path | None = None,
        deadline: float = DEADLINE,
        slow_after: float = DEFAULT_SLOW_AFTER,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        transport: str = "auto",
        backend: str = "auto",
    ) -> None:
        installed.check()
        check(
            algorithm=algorithm, cluster_resolver=cluster_resolver, sync=sync,
            error_feedback=error_feedback, bucket_bytes=bucket_bytes,
            own_losses=own_losses, batch_norm=batch_norm, schedule_file=schedule_file,
            deadline=deadline, slow_after=slow_after, join_timeout=join_timeout,
            transport=transport, backend=backend,
        )  # fmt: skip
        policy = policy_of(wire, method, error_feedback)
        self.sync = _rule(sync, wire=wire, method=method, error_feedback=error_feedback)
        in_rounds = not isinstance(self.sync, EveryStep)
        backend = backends.checked(
            backend,
            policy,
            error_feedback=error_feedback,
            algorithm=algorithm,
            schedule_file=schedule_file,
            transport=transport,
            sync=self.sync if in_rounds else None,
        )
        if bucket_bytes is not None:
            bucket_bytes = number_of_bytes(bucket_bytes, "bucket_bytes")
        self.synchronizes_batch_norm = batch_norm == "synchronized"
        self.own_losses = own_losses
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.rounds: Rounds | None = None
        patience = (deadline, slow_after, join_timeout)
        tf.distribute.Strategy.__init__(
            self, Extended(self, devices, cluster_resolver, *patience, transport)
        )
        extended = self.extended
        if backend == backends.AUTO:
            backend = backends.TENSORFLOW if extended.on_gpus else backends.ENGINE
        _say_who_trains(extended)
        if policy != MethodPolicy():
            asked = f"wire={wire!r}" if method is None else f"method={method!r}"
            self._say_if_nothing_travels(asked)
        if in_rounds:
            self._say_if_nothing_travels(f"sync={self.sync!r}")
        _join(
            extended,
            {
                "list of devices": [name.rsplit("device:", 1)[-1] for name in extended.devices],
                "algorithm": algorithm,
                "wire": repr(policy) if method is None else None,
                "method": method and repr(policy),
                "error_feedback": error_feedback,
                "bucket_bytes": bucket_bytes,
                "backend": backend,
                "sync": self.sync.describe(),
                "batch_norm": batch_norm,
                "own_losses": own_losses,
                "schedule_file": schedule_file and _choices_of(Path(schedule_file)),
            },
        )
        size = size_of_teams(self.sync, extended, algorithm, policy)
        if backend == backends.TENSORFLOW:
            team: Team = TensorFlowTeam(extended.group)
        else:
            schedules = of_replicas(
                algorithm, extended.group, policy.method.wires[0], schedule_file
            )
            team = Team(extended.group, schedules)
        self._connect(team)
        if bucket_bytes is None:
            bucket_bytes = suitable_bytes(team.schedules, team.size)
        trials = Trials(team.schedules, enabled=isinstance(team.schedules, Chooser))
        self._sum_steps_by(team, policy, bucket_bytes, trials)
        if in_rounds:
            self._say_if_without_effect(size, policy)
        if size < extended.number_of_replicas:
            teams = Teams.of(extended, size, algorithm, team.schedules)
            self._train_in_rounds(teams, team, policy, bucket_bytes)

    def _say_if_nothing_travels(self, asked: str) -> None:
        if self.extended.number_of_replicas == 1:
            logging.getLogger("tfscale").warning(_NOTHING_TRAVELS, asked)

    def _connect(self, team: Team) -> None:
        extended = self.extended
        extended.connect(team, of_hosts(team.schedules, extended.hosts))
        before_callbacks_get_their_model(backup.arrange, self)
        output.ignore_warning_about_shuffle()
        if extended.worker > 0 and not os.environ.get(ALL_BARS):
            output.show_no_bars_by_default(self)
        if extended.number_of_workers > 1:
            saving.write_whole_files(self)
            logging.getLogger("tfscale").info(
                "gradients go from this worker's first replica to the others: %s", team.ways()
            )

    def _sum_steps_by(
        self, team: Team, policy: MethodPolicy, bucket_bytes: int, trials: Trials
    ) -> None:
        self.reducer = Reducer(team, policy, bucket_bytes, trials)
        # The policy is for gradients only: steps are divided by curvature, so it is not rounded.
        self.curvature_reducer = Reducer(
            team, MethodPolicy(), bucket_bytes, trials, what="curvature", suffix="/curvature"
        )

    def _train_in_rounds(
        self, teams: Teams, team: Team, policy: MethodPolicy, bucket_bytes: int
    ) -> None:
        """Set up training by a rule with rounds.

        If several replicas make steps together, gradients are then summed within such teams.
        """
        if teams.team is not None:
            everybody = (self.extended.group, self.extended.hosts)
            within = [each for each in everybody if each is not None]
            farewell.when_the_program_ends(teams.parts, within)
            # Trials in each team could choose different schedules.
            no_trials = Trials(teams.team.schedules, enabled=False)
            self._sum_steps_by(teams.team, policy, bucket_bytes, no_trials)
        no_trials = Trials(team.schedules, enabled=False)  # weights are sent too rarely
        rule, keeps_as = self.sync.round_rule, "" if teams.team is None else "outer_"
        of_weights = (rule.policy, bucket_bytes, no_trials, "weights", keeps_as)
        self.rounds = Rounds(self, rule, Reducer(team, *of_weights), teams)

    def _say_if_without_effect(self, size: int, policy: MethodPolicy) -> None:
        """Warn if all replicas make each step together, or if no step sums gradients."""
        replicas = self.extended.number_of_replicas
        if size == replicas > 1:
            logging.getLogger("tfscale").warning(_ONE_GROUP, self.sync, size)
        if 1 == size < replicas and policy != MethodPolicy() and not self.sync.start:
            logging.getLogger("tfscale").warning(_GROUPS_OF_ONE, policy, self.sync)

    @property
    def reducers(self) -> list[Reducer]:
        """Reducers of gradients and of measured curvature, and the reducer that computes the means
        at the end of a round, if there are rounds.
        """
        of_steps = [self.reducer, self.curvature_reducer]
        return of_steps if self.rounds is None else [*of_steps, self.rounds.reducer]

    @property
    def cluster_resolver(self) -> Any:
        """Cluster resolver, which lists the workers."""
        return self.extended.cluster_resolver

    @property
    def num_replicas_in_sync(self) -> Any:
        """Number of replicas; in a step, division by it multiplies by the replica's share."""
        return super().num_replicas_in_sync if current.count is None else current.count

    def scope(self) -> Any:
        """Return a context; models, optimizers and variables made in it belong to this strategy."""
        origin.refuse_other_scope(self)
        building.prepare_to_build(self)
        beginning = fit.begins()
        if beginning is not None:
            model, callbacks, length = beginning
            join.same_model(self.extended.hosts, model)
            join.same_length(self.extended.hosts, length)
            if self.extended.worker == 0:
                _say_if_no_timeline(callbacks)
            if self.rounds is not None:
                self.rounds.begins(model, callbacks, length)
        return super().scope()

    @autograph_artifact
    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Call ``fn`` on every replica, with its part of each distributed argument."""
        if self.extended.number_of_replicas == 1:
            return super().run(fn, args, kwargs, options)
        _refuse_xla(self)
        refuse_tf_keras(fn)
        step = fit.step_of(fn)
        if fit.predicts():
            args = tf.nest.map_structure(self._part_of_each, args)
            step_of_replica = steps.prediction_of_replica(self, fn)
            return predictions.joined(self, super().run(step_of_replica, args, kwargs, options))
        if step is None:
            with _hooked(self, self.optimizers), self._telling_what_is_foreign():
                return super().run(fn, args, kwargs, options)
        with steps.exact(self, step.model, step.kind == fit.TRAINING):
            return super().run(steps.step_of_replica(self, step, fn), args, kwargs, options)

    def part_of_mean(self, compute: Callable[[], Any]) -> Any:
        """Return a replica's mean loss over its rows as its part of the global batch's loss.

        Call this in a step of one of several replicas. A loss of Keras's loss objects is such a
        part already, and stays as it is.

        Args:
            compute: a function that returns the loss.
        """
        return part_of_mean(compute)

    @contextlib.contextmanager
    def _telling_what_is_foreign(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            origin.refuse_by(self, error, OPTIMIZERS)
            raise

    def _part_of_each(self, value: Any) -> Any:
        """Cut a batch that is not distributed yet into a part for each local replica."""
        local = len(self.extended.worker_devices)
        if isinstance(value, np.ndarray):  # an eager step, or ``predict_on_batch``
            value = tf.convert_to_tensor(value)
        if local == 1 or not tf.is_tensor(value) or isinstance(value, DistributedValues):
            return value
        ranks, me = self.extended.number_of_replicas, self.extended.worker
        rows, workers = tf.shape(value)[0], ranks // local
        # Keras joins what all first replicas predict, then all second ones, and so on.
        places = [replica * workers + me for replica in range(local)]
        parts = [value[rows * at // ranks : rows * (at + 1) // ranks] for at in places]
        return PerReplica(tuple(parts))

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
        distribute: Callable[[Any], Any] = functools.partial(
            super().experimental_distribute_dataset, options=options
        )
        if self.extended.number_of_replicas == 1:
            distribute = _as_it_is
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
        told = {} if self.extended.on_gpus else {"memory": memory.words()}
        if self.rounds is not None:
            told |= {"rounds": self.rounds.words(), "title": self.rounds.title}
            every += self.rounds.sent_by_rules()
        return Explanation(every, team.size, team.ways(), **told)

    def dump(self, path: str | Path) -> None:
        """Write what ``"auto"`` measured and chose; edit it and pass it as ``schedule_file``."""
        schedules = self.extended.team.schedules
        if not isinstance(schedules, Chooser):
            raise ValueError(
                "there is nothing to write: you named a schedule, or there is one replica. "
                'With algorithm="auto" and several replicas there is a choice to write'
            )
        self.reducer.trials.tell_chooser()
        schedules.dump(path)

    def __repr__(self) -> str:
        return f"<ScaleStrategy of {self.extended.number_of_replicas} replicas>"

    def born(self, optimizer: Optimizer) -> None:
        """Record an optimizer that has been made in this strategy's scope."""
        self.optimizers.add(optimizer)
        building.remember(self, optimizer)


def _say_if_no_timeline(callbacks: Sequence[Any]) -> None:
    """Warn if a timeline is requested and no callback records it.

    The launcher could only report this at the end, perhaps after days.
    """
    if not os.environ.get(TIMELINE_VARIABLE):
        return
    from tfscale.callbacks import telemetry

    if not any(isinstance(each, telemetry.Telemetry) for each in callbacks):
        logging.getLogger("tfscale").warning(
            "tfscale launch --timeline asks for a timeline, and this fit records none: give it the "
            "callback tfscale.callbacks.Telemetry(), which records steps 10 to 12"
        )


def check(**given: Any) -> None:
    """Raise if an argument of ``ScaleStrategy`` is wrong by itself, on any machine."""
    for name, value in given.items():
        if name in _ALWAYS or (value is not None and name in _UNLESS_NONE):
            (_ALWAYS.get(name) or _UNLESS_NONE[name])(value, name)


def _checked_rule(sync: Any, name: str) -> Any:
    expected = "a rule of tfscale.sync, such as tfscale.sync.DiLoCo(every=100), or None"
    return arguments.instance(sync, name, Rule, expected)


def _slow_after(value: float, name: str) -> float:
    return checked_patience(DEADLINE, value)[1]


_ALWAYS: dict[str, Callable[[Any, str], Any]] = {
    "algorithm": lambda value, name: checked_algorithm(value, name, "auto"),
    "batch_norm": lambda value, name: arguments.choice(value, name, ("synchronized", "local")),
    "deadline": arguments.seconds,
    "slow_after": _slow_after,
    "join_timeout": arguments.seconds,
    "transport": checked_transport,
    "backend": lambda value, name: arguments.choice(value, name, backends.BACKENDS),
}
_UNLESS_NONE: dict[str, Callable[[Any, str], Any]] = {
    "cluster_resolver": checked_resolver,
    "sync": _checked_rule,
    "error_feedback": arguments.flag,
    "bucket_bytes": number_of_bytes,
    "schedule_file": arguments.path,
    "own_losses": lambda value, name: arguments.choice(value, name, CHOICES),
}


def _join(extended: Extended, settings: Mapping[str, Any]) -> None:
    """Wait for all workers, and compare their settings."""
    if extended.hosts is not None:
        extended.hosts.join()
    join.same_start(extended.hosts, settings)
    if extended.group is not None:
        extended.group.join()  # only ranks that have joined learn of another one's failure
        if extended.hosts is not None:
            farewell.when_the_program_ends([extended.group, extended.hosts])


def _choices_of(schedule_file: Path) -> str:
    try:
        return records.read_text(schedule_file)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"schedule_file={str(schedule_file)!r} is not here: each worker reads a file of that "
            "name, which strategy.dump writes"
        ) from None


def _refuse_xla(strategy: Any) -> None:
    """Raise if XLA compiles a step for several replicas, while the step is traced."""
    if not is_compiled_by_xla():
        return
    raise ValueError(
        f"jit_compile=True cannot train on {strategy.num_replicas_in_sync} replicas: XLA compiles "
        "for one device, and can neither read the variables of another nor exchange gradients. "
        'Use jit_compile="auto" (or False): model.compile(..., jit_compile="auto").'
    )


def _as_it_is(dataset: Any) -> Any:
    """Return the dataset itself: a single replica gets all of it."""
    return dataset


def _say_who_trains(extended: Any) -> None:
    replicas, workers = extended.number_of_replicas, extended.number_of_workers
    here = ", ".join(name.rsplit("device:", 1)[-1] for name in extended.devices)
    where = here if workers == 1 else f"{workers} workers, each on its {here}"
    word = "replica trains" if replicas == 1 else "replicas train"
    logging.getLogger("tfscale").info("ScaleStrategy: %d %s, on %s", replicas, word, where)


def _rule(sync: Rule | None, **of_gradients: Any) -> Rule:
    """Return the rule by which replicas agree.

    Args:
        sync: the user's argument ``sync``.
        of_gradients: arguments that say how the gradients of a step are sent.

    Raises:
        ValueError: the rule does not work with Keras 2, or with an argument for gradients.
    """
    if sync is None or isinstance(sync, EveryStep):
        return EveryStep()
    if KERAS_2:
        raise ValueError(
            f"sync={sync!r} needs Keras 3, and this is Keras 2: leave sync out, and replicas agree "
            "after every step"
        )
    given = {name: value for name, value in of_gradients.items() if value is not None}
    if given and not sync.sums_gradients:
        said = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"{said} says how gradients are sent, and with sync={sync!r} none are: replicas send "
            "weights, or differences of weights. Say it of these: "
            'sync=tfscale.sync.DiLoCo(every=100, wire="int8")'
        )
    return sync


def _rank(value: Any) -> Any:
    one = value.values[0] if isinstance(value, DistributedValues) else value
    return tf.convert_to_tensor(one).shape.rank
