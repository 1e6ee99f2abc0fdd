"""Implementation of ``ScaleStrategy``: the methods that TensorFlow calls, with our collectives.

The class extends TensorFlow's class for several workers, which provides datasets, variables and
replicas, and replaces all of its collectives. Keras checks for TensorFlow's class before it reduces
logs or joins predictions across workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.calls import caller, goes_back
from tfscale.bridge.feed import Batches, BatchesOfReplicas, WholeBatches, untuned
from tfscale.bridge.fit import compiling, joins_predictions
from tfscale.bridge.objects import OPTIMIZERS, native, path_of
from tfscale.bridge.tensorflow import (
    CollectiveAllReduce,
    CollectiveAllReduceExtended,
    CommunicationImplementation,
    DistributedValues,
    DistributedVariable,
    ExtendedOfWorkers,
    Mirrored,
    Options,
    PerReplica,
    mark_as_unsaveable,
    own_copy,
    read_from_outside,
    regroup,
    replica_id,
)
from tfscale.exchange.collective_schedules import CollectiveSchedules
from tfscale.exchange.rows import sum_all, with_numbers
from tfscale.exchange.slots import created_now
from tfscale.exchange.team import Team
from tfscale.native import Group
from tfscale.native.group import has_started, host_of, resolver_of, starting
from tfscale.native.memory import keep_memory
from tfscale.parallel.grid import Grid
from tfscale.parallel.layout import Layout
from tfscale.parallel.matrix import Matrix
from tfscale.strategy.batch.balance import Balance, Clock
from tfscale.strategy.batch.shares import Shares
from tfscale.strategy.building import take_over
from tfscale.strategy.losses.own_losses import summed_backwards
from tfscale.strategy.new_variables import made
from tfscale.strategy.placed import Placed, Placement, WholeView, placed_now, placing
from tfscale.strategy.settings import Settings
from tfscale.strategy.shards.sharding import placement_beside
from tfscale.strategy.step import during, on_a_replica, this_step
from tfscale.strategy.workers import signals
from tfscale.support import arguments


class _EngineOps(CollectiveAllReduce):
    """TensorFlow's reductions outside of replicas, with the engine's collectives."""

    def __init__(self, devices: Sequence[str], team: Team) -> None:
        super().__init__(devices, team.size, _options())
        self._team = team

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        sums = sum_all(self._team, replica_id, tf.nest.flatten(value), "reduce")
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            sums = [_divided(x, self._team.size) for x in sums]
        return tf.nest.pack_sequence_as(value, sums)

    def _all_reduce_per_replica_values(self, reduce_op: Any, values: Any, options: Any) -> Any:
        def one(replica: int) -> Any:
            return self._all_reduce(
                reduce_op, [v.values[replica] for v in values], replica, options
            )

        mark_as_unsaveable()
        each = self._team.on_each(one)
        return [regroup(parts, wrap_class=Mirrored) for parts in zip(*each, strict=True)]

    def _batch_all_gather(self, per_replica_values: Any, axis: int, options: Any) -> Any:
        def one(replica: int) -> Any:
            return [self._team.concat(replica, v.values[replica], axis) for v in per_replica_values]

        each = self._team.on_each(one)
        return [regroup(parts, wrap_class=Mirrored) for parts in zip(*each, strict=True)]


_TENSORFLOWS = ("collective_all_reduce_strategy", "mirrored_strategy")


@contextlib.contextmanager
def _quiet_tensorflow_logs() -> Iterator[None]:
    """Silence what TensorFlow's classes log about their collectives, which tfscale replaces."""

    def of_others(record: logging.LogRecord) -> bool:
        return record.module not in _TENSORFLOWS

    log = tf.get_logger()
    log.addFilter(of_others)
    try:
        yield
    finally:
        log.removeFilter(of_others)


class Extended(ExtendedOfWorkers):
    """Implementation of a ``ScaleStrategy``: datasets, variables, replicas and reductions.

    Attributes:
        team: team of all replicas.
        first_rank: rank of this process's first replica.
        grid: grid of the replicas, with all its sizes.
        shares: how many rows of a batch each replica takes; None if all take equally many.
    """

    _enable_check_health = False  # the engine detects failed workers by itself, and sooner

    def __init__(self, container: tf.distribute.Strategy, settings: Settings) -> None:
        deadline, join_timeout = settings.deadline, settings.join_timeout
        self._patience = (deadline, settings.slow_after)
        self._transport, self._wanted = settings.transport, settings.devices
        cluster_resolver = resolver_of(settings.cluster_resolver, join_timeout, self._wanted)
        keep_memory()
        # For a second strategy, TensorFlow would restart its server. The server would then forget
        # a faster worker that has already asked to join.
        self._std_server_started = has_started()
        with starting(cluster_resolver, deadline, join_timeout), _quiet_tensorflow_logs():
            super().__init__(container, cluster_resolver, _options())
        if self._task_type is not None:  # TensorFlow's server catches SIGTERM
            signals.listen(f"/job:{self._task_type}/task:{self._task_id}")
        # Workers match groups by the order in which they make them. If their devices differ, the
        # group of hosts detects it, so it must come first.
        self.hosts = self._make_group([host_of(self._devices[0])])
        self.group = self._make_group(self._devices)
        self.first_rank = self._id_in_cluster * len(self._devices)
        several = self.number_of_replicas > 1
        wanted = settings.grid if several else None
        self.grid = (wanted or Grid()).of(self.number_of_replicas)
        self.grid.check_workers(len(self._devices))
        self.shares: Shares | None = None
        if settings.shares is not None and several:
            self.shares = Shares(
                settings.shares, self.number_of_replicas, self._devices, self._id_in_cluster
            )

    @property
    def groups(self) -> list[Group]:
        """Groups of all replicas and of all workers, if there are several."""
        return [each for each in (self.group, self.hosts) if each]

    def connect(self, team: Team, hosts: CollectiveSchedules) -> None:
        """Make replicas reduce by this team, and hosts by these schedules, from now on."""
        self.team = team
        self.host_team = Team(self.hosts, hosts)
        self._cross_device_ops = _EngineOps(self._devices, self.team)
        self._host_cross_device_ops = _EngineOps([host_of(self._devices[0])], self.host_team)

    def _make_group(self, devices: Sequence[str]) -> Group | None:
        if self._num_workers * len(devices) == 1:
            return None
        names = [name[name.index("device:") :] for name in devices]
        if self._num_workers == 1:
            return Group.local([f"/{name}" for name in names], *self._patience, self._transport)
        return Group.of_workers(self._cluster_resolver, names, *self._patience, self._transport)

    # -- devices

    @property
    def on_gpus(self) -> bool:
        """Whether this process's replicas are on GPUs."""
        return bool(self._local_device_type == "GPU")

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> Any:
        kind, names = local_devices(self._wanted, worker_device)
        return tuple(f"{worker_device}/{name}" for name in names), kind

    def gives_outputs(self) -> bool:
        """Return whether the replica that calls this gives the outputs for its rows."""
        return self.grid.gives_outputs(self.first_rank + replica_id())

    # -- data

    def _make_input_context(self) -> tf.distribute.InputContext:
        """Return which part of the data this worker reads; TensorFlow calls this."""
        local, team = len(self._devices), self.grid.team
        teams = self.number_of_replicas // team
        pipelines, own = self._num_workers, self._id_in_cluster
        if local < team:  # several workers read the same rows
            pipelines, own = teams, self.first_rank // team
        return tf.distribute.InputContext(pipelines, own, teams)

    @property
    def clock(self) -> Clock | None:
        """Clock of the step that this replica makes; None if nobody measures steps."""
        step = this_step()
        balance: Balance | None = self._container_strategy().balance
        if step.model is None and balance is not None:  # a custom training loop
            return balance.clock(replica_id())
        return step.clock

    @property
    def part(self) -> Callable[[Any, int], Any] | None:
        """Function that returns the rows of a batch that a local replica takes, if shares say."""
        return None if self.shares is None else self.shares.part

    @property
    def takers(self) -> int:
        """Number of local replicas of a model team, which all take the same rows."""
        return min(self.grid.team, len(self._devices))

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        dataset = untuned(dataset)
        if self.shares is not None:
            self.shares.check(dataset, self._num_workers)
        elif self._leaves_to_tensorflow(options):
            return super()._experimental_distribute_dataset(dataset, options)
        kind = Batches if self.shares is None else WholeBatches
        context = self._make_input_context()
        return kind(
            self._input_workers,
            self._container_strategy(),
            dataset,
            num_replicas_in_sync=context.num_replicas_in_sync,
            input_context=context,
        )

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        def of_worker(context: Any) -> Any:
            return untuned(dataset_fn(context))

        if self.shares is not None:
            raise ValueError(_OWN_BATCHES)
        if self._leaves_to_tensorflow(options):
            return super()._distribute_datasets_from_function(of_worker, options)
        return BatchesOfReplicas(
            self._input_workers,
            self._container_strategy(),
            input_contexts=[self._make_input_context()],
            dataset_fn=of_worker,
        )

    def _leaves_to_tensorflow(self, options: Any) -> bool:
        """Return whether TensorFlow's own datasets serve replicas that each read other rows."""
        return self.grid.team == 1 and (options is not None or self._local_device_type != "CPU")

    # -- reductions

    def _use_merge_call(self) -> bool:
        # Each replica reduces by its own operation. So replicas need not meet in one thread, and
        # reductions work within branches and loops.
        return False

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if self._num_replicas_in_sync == 1:
            return value
        step, backwards = this_step(), goes_back()

        def reduced(team: Team, own: list[Any]) -> list[Any]:
            def sums(tensors: list[Any]) -> list[Any]:
                return team.together(
                    lambda replica, each: sum_all(team, replica, each, "reduce"), tensors
                )

            if backwards and step.rows is not None:
                found = summed_backwards(sums, own)
            else:
                found = sums([step.counted(x) for x in own])
            if is_mean:
                holders = team.size if step.rows is None else step.rows.holders
                found = [_divided(x, holders) for x in found]
            return found

        def applied(gradient: Any) -> Any:
            # In ``fit`` gradients are weighted, so that their sum is that of the whole batch.
            is_of_loop = step.rows is None
            return _divided(gradient, self.team.size) if is_mean and is_of_loop else gradient

        # The user's step may sum gradients that it sees as sums already.
        is_mean, given = reduce_op == tf.distribute.ReduceOp.MEAN, tf.nest.flatten(value)
        own = step.gradients.computed(given)
        combine = functools.partial(step.together, self.team, reduced)
        clock = self.clock
        flat = combine(own) if clock is None else clock.leave_out(combine, own)
        flat = step.gradients.show_own_sums(given, flat, applied)
        return tf.nest.pack_sequence_as(value, flat)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if tf.nest.is_nested(value) and not isinstance(value, DistributedValues):
            return tf.nest.map_structure(lambda v: self._reduce_to(reduce_op, v, v, options), value)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        if isinstance(value, DistributedValues) or len(self.worker_devices) > 1:
            return super()._gather_to_implementation(value, destinations, axis, options)
        # TensorFlow refuses this value of one local replica: while traced it is on no device.
        return self.team.concat(0, tf.convert_to_tensor(value), axis)

    def _in_multi_worker_mode(self) -> bool:
        """Return whether Keras must join what workers predict; not if ``run`` has joined it."""
        return bool(super()._in_multi_worker_mode()) and not joins_predictions()

    # -- variables

    def _create_variable(self, next_creator: Any, **keywords: Any) -> Any:
        if keywords.get("synchronization") == tf.VariableSynchronization.ON_READ:
            model = compiling()  # compile makes at least one metric: the loss
            if model is not None:
                take_over(self._container_strategy(), model)
        if (keywords.get("name") or "").startswith("iteration"):
            optimizer = caller(OPTIMIZERS)
            if optimizer is not None:
                self._container_strategy().born(optimizer)
        create = functools.partial(super()._create_variable, next_creator, **keywords)
        beside = keywords.get("colocate_with")  # the weight whose slot is made, if it is one
        parts = self._container_strategy().parts
        with placing(placed_now() or placement_beside(beside) or parts.placement(beside)):
            in_rounds = self._container_strategy().rounds is not None
            return made(create, keywords, in_rounds)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        copy = colocate_with_variable
        if on_a_replica() and not isinstance(copy, DistributedVariable):
            raise ValueError(_SLOT_IN_AN_UPDATE.format(name=path_of(copy)))
        super()._validate_colocate_with_variable(copy)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str | None, primary_var: Any, **keywords: Any
    ) -> Any:
        if (placement := placed_now()) is not None:
            return self._initial_part(placement, replica_id, keywords)
        in_rounds = self._container_strategy().rounds is not None
        alike = in_rounds and created_now() is not None
        if replica_id > 0 or self._num_workers == 1 or alike:
            # TensorFlow's method for several workers would broadcast by its own collectives.
            return super(CollectiveAllReduceExtended, self)._get_variable_creator_initial_value(
                replica_id, device, primary_var, **keywords
            )
        return lambda: self._common_initial_value(device, keywords)

    def _common_initial_value(self, device: str | None, keywords: Mapping[str, Any]) -> tf.Tensor:
        """Return the first worker's initial value."""
        value = keywords["initial_value"]
        value = value() if callable(value) else value
        value = getattr(value, "wrapped_value", value)  # checkpoints wrap it
        with tf.device(device):
            value = tf.convert_to_tensor(value, dtype=keywords.get("dtype"))
            name = f"the initial value of {keywords.get('name') or 'a variable'}"
            return self.host_team.broadcast(0, value, name)

    def _initial_part(
        self, placement: Placement, replica_id: int, keywords: Mapping[str, Any]
    ) -> Callable[[], tf.Tensor]:
        """Return a function that makes a replica's part of a variable's initial value."""
        layout, rank = placement.layout, self.first_rank + replica_id

        def initial_part() -> tf.Tensor:
            if placement.fill is not None:
                shape, dtype = layout.part_shape(rank), tf.as_dtype(keywords["dtype"])
                return tf.convert_to_tensor(placement.fill(shape, dtype), dtype)
            if placement.first is None:
                placement.first = self._common_initial_value(None, keywords)
            return layout.part(placement.first, rank)

        return initial_part

    def whole(self, layout: Layout, parts: Sequence[tf.Tensor], name: str) -> tf.Tensor:
        """Return a whole array, outside of replicas, from the parts of this worker's replicas.

        All workers call this, and all get the array.
        """
        with tf.device(host_of(self._devices[0])):
            if layout.holder is None:
                matrix = Matrix((layout,))
                rows = tf.concat([matrix.row([part]) for part in parts], 0)
                if self._num_workers > 1:
                    rows = self.host_team.gather(0, rows, name)
                return matrix.wholes(rows)[0]
            root, place = divmod(layout.holder, len(self._devices))
            is_here = root == self._id_in_cluster
            held = parts[place] if is_here else tf.zeros(layout.shape, parts[0].dtype)
            return self.host_team.broadcast(0, held, name, root)

    def _replica_ctx_update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: Any) -> Any:
        """Update this replica's copy of a variable; parts without numbers need no update."""
        if not isinstance(var, Placed):
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        if not own_copy(var).shape.num_elements():
            return None
        if var.layout.holder is None:
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        with during(dataclasses.replace(this_step(), updates_alone=True)):
            return super()._replica_ctx_update(var, fn, args, kwargs, group)

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: Any) -> Any:
        """Update a variable on each replica; functions see the whole of placed variables."""
        args = tf.nest.map_structure(self._as_views, args)
        if not isinstance(var, Placed):
            return super()._update(var, fn, args, kwargs, group)
        views = iter(self._as_views(var).values)
        return super()._update(
            var, lambda part, *others, **more: fn(next(views), *others, **more), args, kwargs, group
        )

    def _as_views(self, value: Any) -> Any:
        own = native(value)
        if not isinstance(own, Placed):
            return value
        whole = read_from_outside(own)
        return PerReplica(tuple(WholeView(own, i, whole) for i in range(len(own.values))))


_SLOT_IN_AN_UPDATE = (
    "an optimizer makes a slot of {name} in update_step(), which each replica calls with its own "
    "copy of the weight: the replicas' slots would be variables of their own. Make the slots in "
    "the optimizer's build(): self.add_variable_from_reference(weight, name=...) for each weight"
)
_OWN_BATCHES = (
    "shares cuts global batches, and distribute_datasets_from_function gives each replica batches "
    "of its own. Use experimental_distribute_dataset with a dataset of global batches; or leave "
    "shares out, and give each replica batches of the size that suits it"
)


def local_devices(wanted: Sequence[str] | None, worker: str | None = None) -> tuple[str, list[str]]:
    """Return the kind and the names ("device:GPU:0") of the devices that this process uses.

    Args:
        wanted: devices as the user names them; None for all of the best kind.
        worker: this worker's name, such as "/job:worker/task:1"; None before it is known.
    """
    here = {}
    for device in tf.config.list_logical_devices():
        name = device.name[device.name.index("device:") :]
        here[name] = device.device_type
    if wanted is None:
        kind = "GPU" if "GPU" in here.values() else "CPU"
        return kind, [name for name in here if here[name] == kind]
    known = ", ".join(name.removeprefix("device:") for name in here)
    expected = f"a list of names, one for each replica, such as {known.split(', ')}"
    wanted = arguments.items(wanted, "devices", expected, arguments.text)
    for given in wanted:
        if worker is not None and _task(given) not in (None, _task(worker), _ALONE):
            raise arguments.wrong(
                given, "devices", f"a list of devices of this worker, {worker}",
                "Each worker names its own: leave the job and the task out",
            )  # fmt: skip
    names = ["device:" + w.upper().rsplit("DEVICE:", 1)[-1].lstrip("/") for w in wanted]
    for given, name in zip(wanted, names, strict=True):
        if name not in here:
            raise ValueError(
                f"devices names {given!r}, which this process does not have: its devices are "
                f"{known}. Name some of these. To use one CPU as several devices, call "
                "tf.config.set_logical_device_configuration first"
            )
    kinds = sorted({here[name] for name in names})
    if len(kinds) > 1:
        raise ValueError(
            f"devices names devices of different kinds, {' and '.join(kinds)}; all replicas must "
            f"run on devices of one kind. Name only {kinds[-1]}s, or only {kinds[0]}s"
        )
    if len(set(names)) < len(names):
        raise ValueError(
            f"devices names a device twice: {list(wanted)}; each replica needs a device of its "
            "own. Name each device once"
        )
    return kinds[0], names


_ALONE = ("localhost", "0")  # a process that has not joined a cluster


def _task(device: str) -> tuple[str, ...] | None:
    """Return the job and the task in a device's name; None if the name has none."""
    found = re.search(r"job:(\w+)/(?:replica:\d+/)?task:(\d+)", device.lower())
    return found and found.groups()


def _options() -> Options:
    return Options(implementation=CommunicationImplementation.RING)


def _divided(x: Any, by: Any) -> Any:
    return with_numbers(x, lambda numbers: numbers / tf.cast(by, x.dtype))
