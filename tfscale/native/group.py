"""Groups of devices that reduce together; each device is a rank."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge import started
from tfscale.bridge.runtime import context, coordination_leader
from tfscale.cluster import addresses, config, this_worker
from tfscale.cluster.meeting import JoinError, Worker, meet
from tfscale.cluster.watch import describe_reachability, log_waiting, watched
from tfscale.native import library, log as _log, transport as _transport
from tfscale.native.bucket import BucketId, Name, bucket_id
from tfscale.native.devices import split_cpu, take_share
from tfscale.native.memory import keep_memory
from tfscale.support import arguments

DEFAULT_DEADLINE = 120.0
DEFAULT_SLOW_AFTER = 5.0
DEFAULT_JOIN_TIMEOUT = 300.0
_ANSWER, _ASKED_AT_ONCE = 5, 16  # seconds to wait for a worker's answer; workers asked at a time
_LAST_WORDS = 30.0  # seconds; ranks tell each other of a missed deadline in less time

_TOO_LATE = (
    "TensorFlow was started {by}, before this process has joined its cluster. With several workers "
    "make the strategy first: move `strategy = tfscale.ScaleStrategy(...)` to the top of the "
    "program, behind the imports, before any dataset, tensor, layer or model."
)

# Number of groups of the same devices that this process has made.
_made: collections.Counter[tuple[str, ...]] = collections.Counter()


class Communicator:
    """Membership of one device in a group. The collective ops take it as an argument.

    Attributes:
        rank: rank of the device in the group.
        devices: full names of all ranks' devices.
        group_key: number that identifies the group in TensorFlow.
        handle: resource that the ops take.
    """

    def __init__(
        self,
        rank: int,
        devices: Sequence[str],
        peers: Sequence[str],
        group_key: int,
        deadline: float,
        slow_after: float,
        transport: Mapping[str, Any],
    ) -> None:
        self.rank = rank
        self.devices = tuple(devices)
        self.group_key = group_key
        self._counts: weakref.WeakKeyDictionary[Any, collections.Counter[BucketId]] = (
            weakref.WeakKeyDictionary()
        )
        with tf.init_scope(), tf.device(self.device):
            self.handle = library.load().tfscale_communicator(
                group_key=group_key,
                rank=rank,
                devices=list(devices),
                peers=list(peers),
                deadline_ms=max(1, round(deadline * 1000)),
                slow_after_ms=round(slow_after * 1000),
                **transport,
                shared_name=f"tfscale_{group_key}",
            )

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""
        return len(self.devices)

    @property
    def device(self) -> str:
        """Full name of this rank's device."""
        return self.devices[self.rank]

    def new_bucket(self, name: Name) -> BucketId:
        """Return the next bucket of this name, the same on all ranks that trace the same function.

        Each traced function, together with its loops and branches, counts its buckets from 1. So a
        trace that fails, or that only one rank makes, does no harm. Eager ops run one after the
        other and share a bucket, since TensorFlow keeps a kernel for every name that it has seen.
        To build a layer, Keras calls it in a graph that never runs. Only the first replica does so,
        so that graph counts its own buckets.
        """
        bucket = bucket_id(name)
        if tf.executing_eagerly():
            return bucket
        graph = tf.compat.v1.get_default_graph()
        while belongs_to_its_outer(graph):
            graph = graph.outer_graph
        counts = self._counts.setdefault(graph, collections.Counter())
        counts[bucket] += 1
        traced_in = getattr(graph, "name", "graph")
        return bucket._replace(graph=traced_in, number=counts[bucket])

    def log(self, last: int | None = None) -> list[_log.Execution]:
        """Return the last collectives of this rank, at most 4096, in the order of their ends."""
        last = arguments.optional(arguments.whole, last, "last", 0)
        with tf.init_scope(), tf.device(self.device):
            return _log.executions(self.handle, last)

    def totals(self) -> dict[BucketId, _log.Total]:
        """Return the totals of all collectives of this rank, by bucket."""
        with tf.init_scope(), tf.device(self.device):
            return _log.totals(self.handle)

    def ways(self) -> list[str]:
        """Return the transport of this rank's messages to each rank, such as ``"shared memory"``.

        The list is empty before the ranks have connected.
        """
        return self._ways()[0]

    def why_not_sockets(self) -> str:
        """Return why ``transport="auto"`` chose gRPC instead of sockets, or an empty text."""
        return self._ways()[1]

    def _ways(self) -> tuple[list[str], str]:
        with tf.init_scope(), tf.device(self.device):
            ways, why_not = library.load().tfscale_ways(self.handle)
        return [way.decode() for way in ways.numpy()], why_not.numpy().decode()

    def watch(self) -> tuple[int, str]:
        """Return whether a rank has given up or is gone, though no collective of tfscale runs.

        Call this for steps that run other collectives. Over gRPC it reports nothing.

        Returns:
            The code of TensorFlow's error, 0 if all ranks are well; and a text that names the rank
            and the reason.
        """
        with tf.init_scope(), tf.device(self.device):
            code, why = library.load().tfscale_watch(self.handle)
        return int(code.numpy()), why.numpy().decode()

    def give_up(self, reason: str, linger: float = 5.0) -> None:
        """Tell all ranks that this process's step has failed while no collective was running.

        Ranks that wait in a collective, or start the next collective of that step, fail at once
        with this rank's name and the reason. Then the group can continue. Without this call, the
        other ranks would wait until their deadline. Call this once for each failure, but not for an
        error that a collective raised: all ranks know of such an error. (Before the first
        collective, call ``Group.give_up``, which lets all local ranks join first.)

        Args:
            reason: text for the other ranks, which see about 900 characters of it.
            linger: largest number of seconds to wait until all ranks have read the reason.
        """
        arguments.instance(reason, "reason", str, "a text")
        linger = arguments.seconds(linger, "linger", least=0)
        with tf.init_scope(), tf.device(self.device):
            library.load().tfscale_give_up(self.handle, reason, tf.constant(linger, tf.float64))

    def announce_exit(self, reason: str, linger: float) -> None:
        """Tell all ranks that this process's program ends, and how.

        Only collectives that still need this rank fail, with this reason. If the ranks have not
        connected yet, this call tells no rank.

        Args:
            reason: text for the other ranks, as in ``give_up``.
            linger: largest number of seconds to wait until all ranks have read the reason.
        """
        with tf.init_scope(), tf.device(self.device):
            library.load().tfscale_give_up(
                self.handle, reason, tf.constant(linger, tf.float64), exits=True
            )

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.ranks} on {self.device}>"


class Group:
    """Ranks that reduce together, with the communicators of this process's ranks.

    Args:
        devices: full names of all ranks' devices, in rank order.
        peers: description of each rank in errors and warnings.
        local_ranks: ranks of this process.
        deadline: largest number of seconds that a collective may make no progress.
        slow_after: number of seconds without progress after which a warning names the late ranks;
            0 for no warnings.
        transport: transport of messages between ranks. ``"sockets"``: memory within a process,
            shared memory within a host, TCP between hosts; ``"grpc"``: TensorFlow's gRPC;
            ``"auto"``: sockets if all ranks can connect, else gRPC, with a warning that says why.
        host: this process's address in the cluster, without the port; empty for a single process.

    Example:
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> @group.function
        ... def total(communicator, x):
        ...     return tfscale.ops.all_reduce(x, communicator)
        >>> first, second = total([tf.constant([1.0]), tf.constant([2.0])])
        >>> print(first.numpy(), second.numpy())
        [3.] [3.]
    """

    def __init__(
        self,
        devices: Sequence[str],
        peers: Sequence[str],
        local_ranks: Sequence[int],
        deadline: float = DEFAULT_DEADLINE,
        slow_after: float = DEFAULT_SLOW_AFTER,
        transport: str = "auto",
        host: str = "",
    ) -> None:
        deadline, slow_after = checked_patience(deadline, slow_after)
        expected = "a list of the full names of all ranks' devices"
        devices = arguments.items(devices, "devices", expected, arguments.text)
        ranks, expected = len(devices), "a list with a name for each device"
        peers = arguments.items(peers, "peers", expected, arguments.text, least=ranks, most=ranks)
        local_ranks = _checked_ranks(local_ranks, "local_ranks", ranks)
        if not isinstance(host, str):
            raise arguments.wrong(host, "host", "an address, or an empty text")
        group_key = _new_group_key(devices)
        self.peers = tuple(peers)
        self.deadline = deadline
        self.slow_after = slow_after
        self.host = host
        over = _transport.attributes(transport, host)
        self.transport = over["transport"]
        self.communicators = [
            Communicator(rank, devices, peers, group_key, deadline, slow_after, over)
            for rank in local_ranks
        ]

    @classmethod
    def local(
        cls,
        devices: Sequence[str] | None = None,
        deadline: float = DEFAULT_DEADLINE,
        slow_after: float = DEFAULT_SLOW_AFTER,
        transport: str = "auto",
    ) -> Group:
        """Return a group of this process's devices.

        Args:
            devices: names such as ``"CPU:0"``; all GPUs, or all logical CPUs, by default.
            deadline: largest number of seconds that a collective may make no progress.
            slow_after: number of seconds without progress after which a warning names the late
                ranks; 0 for no warnings.
            transport: transport of messages between ranks; see ``Group``.
        """
        names = _full_names(devices)
        peers = [_short(name) for name in names]
        return cls(names, peers, range(len(names)), deadline, slow_after, transport)

    @classmethod
    def cluster(
        cls,
        resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        deadline: float = DEFAULT_DEADLINE,
        slow_after: float = DEFAULT_SLOW_AFTER,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        transport: str = "auto",
    ) -> Group:
        """Return a group of all workers' devices; every worker must have as many as this one.

        Args:
            resolver: cluster resolver that lists the workers; by default ``TF_CONFIG``, or the
                launcher that started this process, lists them.
            deadline: largest number of seconds that a collective may make no progress.
            slow_after: number of seconds without progress after which a warning names the late
                ranks; 0 for no warnings.
            join_timeout: number of seconds that workers wait for each other at the start.
            transport: transport of messages between ranks; see ``Group``.
        """
        _transport.checked(transport)
        checked_patience(deadline, slow_after)
        arguments.seconds(join_timeout, "join_timeout")
        arguments.optional(checked_resolver, resolver, "resolver")
        resolver = resolver_of(resolver, join_timeout)
        keep_memory()
        with starting(resolver, deadline, join_timeout):
            tf.distribute.MultiWorkerMirroredStrategy(resolver)  # starts this worker's server
        me = _task(resolver)
        mine = [name[len(me) :] for name in _full_names(None) if name.startswith(me)]
        return cls.of_workers(resolver, mine, deadline, slow_after, transport)

    @classmethod
    def of_workers(
        cls,
        resolver: tf.distribute.cluster_resolver.ClusterResolver,
        devices: Sequence[str],
        deadline: float = DEFAULT_DEADLINE,
        slow_after: float = DEFAULT_SLOW_AFTER,
        transport: str = "auto",
    ) -> Group:
        """Return a group of devices with the same names on every worker.

        The workers' servers must have started.

        Args:
            resolver: cluster resolver that lists the workers.
            devices: names without the name of a worker, such as ``"device:CPU:0"``.
            deadline: largest number of seconds that a collective may make no progress.
            slow_after: number of seconds without progress after which a warning names the late
                ranks; 0 for no warnings.
            transport: transport of messages between ranks; see ``Group``.
        """
        checked_resolver(resolver, "resolver")
        checked_patience(deadline, slow_after)
        _transport.checked(transport)
        expected = 'a list of names without the worker\'s, such as ["device:CPU:0"]'
        devices = arguments.items(devices, "devices", expected, arguments.text)
        hosts = {task: addresses.split(host)[0] for task, host in tasks_of(resolver)}
        own_host = hosts.pop(_task(resolver))
        all_devices: list[str] = []
        peers: list[str] = []
        local_ranks: list[int] = []
        for task, host in tasks_of(resolver):
            for device in devices:
                if task == _task(resolver):
                    local_ranks.append(len(all_devices))
                all_devices.append(task + device)
                several = f", {_short(device)}" if len(devices) > 1 else ""
                peers.append(str(Worker(_name(task), host)) + several)
        reached_at = _transport.reachable_host(own_host, [*hosts.values()]) if hosts else ""
        return cls(all_devices, peers, local_ranks, deadline, slow_after, transport, reached_at)

    def part(self, ranks: Sequence[int], transport: str | None = None) -> Group:
        """Return a group of some or all of these ranks; each of their processes must make it.

        Args:
            ranks: ranks that take part, in the order of their ranks in the new group.
            transport: transport of messages, as for ``Group``; by default that of this group.
        """
        ranks = _checked_ranks(ranks, "ranks", self.ranks)
        mine = {communicator.rank for communicator in self.communicators}
        return Group(
            [self.communicators[0].devices[rank] for rank in ranks],
            [self.peers[rank] for rank in ranks],
            [place for place, rank in enumerate(ranks) if rank in mine],
            self.deadline,
            self.slow_after,
            transport=transport or self.transport,
            host=self.host,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks in the group, including ranks of other processes."""
        return len(self.peers)

    def give_up(self, reason: str, linger: float = 5.0) -> None:
        """Tell all ranks that this process's step has failed: see ``Communicator.give_up``."""
        self.join()
        self.communicators[0].give_up(reason, linger)

    def join(self) -> None:
        """Wait for all ranks of the group, unless a collective has already connected them."""

        @tf.function(autograph=False)
        def join() -> None:
            for communicator in self.communicators:
                with tf.device(communicator.device):
                    library.load().tfscale_join(communicator.handle)

        who = self.peers[self.communicators[0].rank]
        with tf.init_scope(), log_waiting(f"{who} waits until all {self.ranks} ranks have joined"):
            try:
                join.get_concrete_function()()  # a plain call makes TensorFlow warn of retracing
            except tf.errors.DeadlineExceededError as error:
                raise tf.errors.DeadlineExceededError(
                    None, None, f"{error.message}. {self._silent()}", error.experimental_payloads
                ) from error

    def _silent(self) -> str:
        """Return a sentence that names the workers that do not answer."""
        task_of = {device.split("/device:")[0]: device for device in self.communicators[0].devices}
        own = self.communicators[0].device.split("/device:")[0]
        ranks = [self.communicators[0].devices.index(d) for t, d in task_of.items() if t != own]
        with concurrent.futures.ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
            silent = list(threads.map(self._is_silent, ranks))
        named = [f"rank {rank} ({self.peers[rank]})" for rank, is_ in zip(ranks, silent) if is_]
        if not named:
            return "All workers answer, but one of them has not come this far; its log may say why"
        return f"No answer from {', '.join(named)}: stopped, ended, or cut off"

    def _is_silent(self, rank: int) -> bool:
        try:
            context().check_collective_ops_peer_health(
                self.communicators[0].devices[rank].split("/device:")[0], _ANSWER * 1000
            )
        except tf.errors.OpError:
            return True
        return False

    def function(self, body: Callable[..., Any]) -> Callable[..., list[Any]]:
        """Compile ``body(communicator, *values)`` to run on all local devices at once.

        The compiled function takes a list for each value, with one entry per local device, and
        returns a list of results.
        """

        def run(*per_device: Sequence[Any]) -> list[Any]:
            results = []
            for communicator, *values in zip(self.communicators, *per_device, strict=True):
                with tf.device(communicator.device):
                    results.append(body(communicator, *values))
            return results

        run.__name__ = getattr(body, "__name__", "run")  # names the graph, and so its buckets
        return tf.function(run, autograph=False)  # type: ignore[no-any-return]


def checked_patience(deadline: float, slow_after: float) -> tuple[float, float]:
    """Return ``deadline`` and ``slow_after`` in seconds, or raise if one of them is invalid."""
    what = "a number of seconds (0 for no warnings)"
    most = arguments.LONGEST
    slow_after = arguments.real(slow_after, "slow_after", 0, most, what=what)
    return arguments.seconds(deadline, "deadline"), slow_after


def checked_resolver(resolver: Any, name: str) -> Any:
    """Return ``resolver`` if it lists the workers, else raise ``ValueError``."""
    if hasattr(resolver, "cluster_spec"):
        return resolver
    expected = "one of tf.distribute.cluster_resolver, such as TFConfigClusterResolver()"
    raise arguments.wrong(resolver, name, expected)


def _checked_ranks(given: Any, name: str, ranks: int) -> tuple[int, ...]:
    def rank(value: Any, name: str) -> int:
        return arguments.whole(value, name, 0, ranks - 1, what=f"one of the {ranks} ranks")

    found = arguments.items(given, name, f"a list of some of the {ranks} ranks", rank)
    if len(set(found)) < len(found):
        raise arguments.wrong(given, name, "a list of ranks, each of them once")
    return found


def belongs_to_its_outer(graph: Any) -> bool:
    """Return whether a graph runs as a part of the graph around it, as branches and loops do."""
    is_traced = hasattr(getattr(graph, "outer_graph", None), "outer_graph")
    return is_traced and "scratch_graph" not in graph.name  # its name in Keras 2 and 3


def _full_names(devices: Sequence[str] | None) -> list[str]:
    # Names are short until this process joins a cluster. Then they are full, and the list also has
    # the devices of other hosts.
    with tf.init_scope():
        here = tf.constant(0).device.rsplit("/device:", 1)[0]
    logical = [d.name for d in tf.config.list_logical_devices()]
    known = [
        here + name if name.startswith("/device:") else name
        for name in logical
        if name.startswith(("/device:", f"{here}/"))
    ]
    if devices is None:
        gpus = [name for name in known if ":GPU:" in name]
        return gpus or [name for name in known if ":CPU:" in name]
    names = []
    expected = f"a list of names of devices, such as {[_short(name) for name in known]}"
    for device in arguments.items(devices, "devices", expected, arguments.text):
        match = [name for name in known if device in (name, name[len(here) :], _short(name))]
        if not match:
            raise ValueError(
                f"no device is called {device!r}; this process has "
                f"{', '.join(map(_short, known))}. "
                "tf.config.set_logical_device_configuration makes several of one CPU."
            )
        names.append(match[0])
    return names


def _new_group_key(devices: Sequence[str]) -> int:
    """Return a number that is the same on every rank of a group and differs between groups.

    The number depends on the group's devices, and for groups of the same devices on the order in
    which they are made, which is the same in every process. It is large, because TensorFlow counts
    its own groups from 1.
    """
    _made[tuple(devices)] += 1
    text = "\n".join([*devices, str(_made[tuple(devices)])])
    return 0x40000000 | zlib.crc32(text.encode()) >> 2


def resolver_of(
    given: Any,
    join_timeout: float = DEFAULT_JOIN_TIMEOUT,
    devices: Sequence[str] | None = None,
) -> Any:
    """Return the resolver that lists the workers: the given one, or the one of ``TF_CONFIG``.

    If a launcher has started the workers without ``TF_CONFIG``, this sets ``TF_CONFIG`` first, and
    this worker takes its share of the host's GPUs, or splits its CPU, unless the caller names its
    devices.
    """
    by_variable = tf.distribute.cluster_resolver.TFConfigClusterResolver
    source = None if given else this_worker.configure(timeout=join_timeout)
    if devices is None:
        split_cpu()
        if source:
            take_share(source)
    if given:
        this_worker.note_rank(_number_of_worker(given))
    resolver = given or by_variable()
    if isinstance(resolver, by_variable):
        config.check(os.environ.get("TF_CONFIG", "{}"))
        if resolver.task_type == "evaluator":  # it is no worker, and computes alone
            alone = tf.train.ClusterSpec({})
            return tf.distribute.cluster_resolver.SimpleClusterResolver(alone)
    return resolver


@contextlib.contextmanager
def starting(resolver: Any, deadline: float, join_timeout: float) -> Iterator[None]:
    """Wait for all workers before this worker's server starts, and log whom it waits for.

    If the server has started already, this does not wait: a process starts its server once.
    """
    if resolver.task_type not in ("chief", "worker") or has_started():
        yield
        return
    if started.has_devices():
        raise RuntimeError(_TOO_LATE.format(by=started.describe_start()))
    tasks, own = tasks_of(resolver), _task(resolver)
    workers = [Worker(_name(task), host) for task, host in tasks]
    if own not in dict(tasks):
        known = ", ".join(map(str, workers))
        raise ValueError(
            f"this worker is {_name(own)}, but the workers are {known}. Give it the index of "
            "one of them in TF_CONFIG or in its cluster resolver."
        )
    me = [task for task, _ in tasks].index(own)
    ends = time.monotonic() + join_timeout
    share_port = os.environ.get("TF_GRPC_REUSE_PORT", "").lower() in ("1", "true")
    meet(workers, me, join_timeout, share_port=share_port)
    left = max(1.0, ends - time.monotonic())
    _outlast_tensorflow(resolver, tasks, deadline, left)
    try:
        with watched(workers, me, left):
            yield
    except tf.errors.OpError as error:
        raise JoinError(
            f"{workers[me]} has met all other workers, but then TensorFlow's servers could not "
            f"connect: {error.message} ({describe_reachability(workers)})."
        ) from error


def has_started() -> bool:
    """Return whether this process's server has started."""
    return context().coordination_service is not None


def _outlast_tensorflow(
    resolver: Any, tasks: Sequence[tuple[str, str]], deadline: float, join_timeout: float
) -> None:
    """Derive TensorFlow's timeouts from ours, before a worker's server starts.

    By default TensorFlow's coordination service aborts the collectives of all workers if it has not
    heard from one worker for ten seconds, and their errors may name any worker. A worker reports
    twice within this timeout, so the service may consider a worker lost after half of it. At the
    start, the service would wait for an hour.
    """
    coordinated = tf.compat.v1.ConfigProto().experimental.coordination_config.coordinated_job_list
    jobs = collections.Counter(_job(task) for task, _ in tasks)
    for job, number in jobs.items():
        coordinated.add(name=job, num_tasks=number)
    context().configure_coordination_service(
        service_type="standalone",
        service_leader=coordination_leader(resolver.cluster_spec()),
        cluster_register_timeout_in_ms=round(1000 * join_timeout),
        heartbeat_timeout_in_ms=round(2000 * (deadline + _LAST_WORDS)),
        coordinated_jobs=list(coordinated),
    )


def tasks_of(resolver: Any) -> list[tuple[str, str]]:
    """Return the workers of a cluster with their addresses, in the order of their ranks."""
    jobs = resolver.cluster_spec().as_dict()
    return [
        (f"/job:{job}/replica:0/task:{task}/", host)
        for job in ("chief", "worker")
        for task, host in enumerate(jobs.get(job, []))
    ]


def _number_of_worker(resolver: Any) -> int:
    """Return the index of this process among the workers; 0 if it is none of them."""
    tasks = [task for task, _ in tasks_of(resolver)]
    return tasks.index(_task(resolver)) if _task(resolver) in tasks else 0


def host_of(device: str) -> str:
    """Return the name of the CPU that belongs to the same worker as a device."""
    return device.rpartition("/device:")[0] + "/device:CPU:0"


def _task(resolver: Any) -> str:
    return f"/job:{resolver.task_type}/replica:0/task:{resolver.task_id}/"


def _job(task: str) -> str:
    return task.split("/")[1].split(":")[1]


def _name(task: str) -> str:
    return f"{_job(task)} {task.split('/')[3].split(':')[1]}"


def _short(device: str) -> str:
    return device.rsplit("device:", 1)[-1]
