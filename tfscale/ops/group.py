"""Groups of devices that reduce together, each of them a rank."""

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

from tfscale import arguments
from tfscale.bridge import started
from tfscale.bridge.runtime import context, coordination_leader
from tfscale.launch import addresses, cluster, config
from tfscale.launch.greeting import Worker
from tfscale.launch.meeting import JoinError, meet, narrated, unreachable
from tfscale.launch.watch import watched
from tfscale.ops import library
from tfscale.ops import log as _log
from tfscale.ops import transport as _transport
from tfscale.ops.bucket import BucketId, Name, bucket_id
from tfscale.ops.devices import split_cpu, take_share
from tfscale.ops.memory import keep_memory

DEFAULT_DEADLINE = 120.0
DEFAULT_SLOW_AFTER = 5.0
DEFAULT_JOIN_TIMEOUT = 300.0
_ANSWER, _ASKED_AT_ONCE = 5, 16  # seconds to ask whether a worker lives; and how many at a time
_LAST_WORDS = 30.0  # seconds: more than ranks take after a deadline to tell each other

_TOO_LATE = (
    "TensorFlow was started {by}, before this process has joined its cluster. With several workers "
    "make the strategy first: move `strategy = tfscale.ScaleStrategy(...)` to the top of the "
    "program, behind the imports, before any dataset, tensor, layer or model."
)

# How many groups of the same devices this process has made.
_made: collections.Counter[tuple[str, ...]] = collections.Counter()


class Communicator:
    """One device's membership in a group: pass it to the collective ops.

    Attributes:
        rank: its place in the group.
        devices: the full names of all ranks' devices.
        group_key: a number that its group has alone in TensorFlow.
        handle: the resource that the ops take.
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
        """How many ranks its group has."""
        return len(self.devices)

    @property
    def device(self) -> str:
        """The full name of its device."""
        return self.devices[self.rank]

    def new_bucket(self, name: Name) -> BucketId:
        """The next bucket of this name, the same on all ranks that trace the same function.

        Buckets are counted from the start for each function that is traced (with its loops
        and branches), so a trace that fails, or that only one rank makes, does no harm.
        Eager ops run one after the other and share a bucket, since TensorFlow keeps a kernel
        for every name that it has seen. Keras calls a layer in a graph of its own, which never
        runs, to see what to build: the first replica alone does, so that counts apart.
        """
        bucket = bucket_id(name)
        if tf.executing_eagerly():
            return bucket
        graph = tf.compat.v1.get_default_graph()
        while _belongs_to_its_outer(graph):
            graph = graph.outer_graph
        counts = self._counts.setdefault(graph, collections.Counter())
        counts[bucket] += 1
        traced_in = getattr(graph, "name", "graph")
        return bucket._replace(graph=traced_in, number=counts[bucket])

    def log(self, last: int | None = None) -> list[_log.Execution]:
        """The last collectives of this rank, 4096 or fewer, in the order in which they ended."""
        last = arguments.optional(arguments.whole, last, "last", 0)
        with tf.init_scope(), tf.device(self.device):
            return _log.executions(self.handle, last)

    def totals(self) -> dict[BucketId, _log.Total]:
        """All collectives of this rank, added up for each bucket."""
        with tf.init_scope(), tf.device(self.device):
            return _log.totals(self.handle)

    def ways(self) -> list[str]:
        """How this rank's messages go to each rank, such as ``"shared memory"``; empty before the
        ranks have come together.
        """
        return self._ways()[0]

    def why_not_sockets(self) -> str:
        """Why messages go by gRPC, though ``transport="auto"`` tried sockets; or an empty text."""
        return self._ways()[1]

    def _ways(self) -> tuple[list[str], str]:
        with tf.init_scope(), tf.device(self.device):
            ways, why_not = library.load().tfscale_ways(self.handle)
        return [way.decode() for way in ways.numpy()], why_not.numpy().decode()

    def watch(self) -> tuple[int, str]:
        """Whether a rank has given up or is gone, though no collective of ours runs.

        For steps that run other collectives. Over gRPC nothing tells.

        Returns:
            The code of TensorFlow's error, 0 if all are well; and who it is and why.
        """
        with tf.init_scope(), tf.device(self.device):
            code, why = library.load().tfscale_watch(self.handle)
        return int(code.numpy()), why.numpy().decode()

    def give_up(self, reason: str, linger: float = 5.0) -> None:
        """Tell all ranks that this process's step has failed where no collective was running.

        Ranks that wait in a collective, or start the next one of that step, fail at
        once with this rank's name and the reason; then the group can go on. Without it,
        the others would wait until their deadline. Call it once for each failure, and
        not for an error that a collective raised: all ranks know of that one.
        (Where no collective has run yet, ``Group.give_up`` lets all local ranks join first.)

        Args:
            reason: for the others to read; they see about 900 characters of it.
            linger: how many seconds to wait at most until all ranks have read it.
        """
        arguments.instance(reason, "reason", str, "a text")
        linger = arguments.seconds(linger, "linger", least=0)
        with tf.init_scope(), tf.device(self.device):
            library.load().tfscale_give_up(self.handle, reason, tf.constant(linger, tf.float64))

    def announce_exit(self, reason: str, linger: float) -> None:
        """Tell all ranks that this process's program ends, and how.

        Only collectives that still need this rank fail, with this reason. Where the ranks have
        not come together, nobody is told.

        Args:
            reason: for the others to read, as in ``give_up``.
            linger: how many seconds to wait at most until all ranks have read it.
        """
        with tf.init_scope(), tf.device(self.device):
            library.load().tfscale_give_up(
                self.handle, reason, tf.constant(linger, tf.float64), exits=True
            )

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.ranks} on {self.device}>"


class Group:
    """All ranks that take part, and the communicators of those in this process.

    Args:
        devices: the full names of all ranks' devices, in rank order.
        peers: who each rank is, for messages.
        local_ranks: those of this process.
        deadline: how many seconds a collective may go without any progress.
        slow_after: after how many of them a warning names the ranks that are late;
            0 for no warnings.
        transport: what messages travel over. ``"sockets"``: memory within a process, shared memory
            within a host, TCP between hosts; ``"grpc"``: TensorFlow's; ``"auto"``: sockets if all
            ranks can connect, else gRPC, with a warning that says why.
        host: this process's address in the cluster, without the port; empty if it is alone.

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
        """The devices of this process.

        Args:
            devices: names such as ``"CPU:0"``; all GPUs, or all logical CPUs, by default.
            deadline: how many seconds a collective may go without any progress.
            slow_after: after how many of them a warning names the ranks that are late;
                0 for no warnings.
            transport: what messages travel over; see ``Group``.
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
        """The devices of all workers; every worker must have as many as this one.

        Args:
            resolver: where the workers are; by default what ``TF_CONFIG``, or the launcher that
                started this process, says.
            deadline: how many seconds a collective may go without any progress.
            slow_after: after how many of them a warning names the ranks that are late;
                0 for no warnings.
            join_timeout: how many seconds workers wait for each other at the start.
            transport: what messages travel over; see ``Group``.
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
        """Devices of the same names on every worker, whose servers have been started.

        Args:
            resolver: where the workers are.
            devices: names without the worker's, such as ``"device:CPU:0"``.
            deadline: how many seconds a collective may go without any progress.
            slow_after: after how many of them a warning names the ranks that are late;
                0 for no warnings.
            transport: what messages travel over; see ``Group``.
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
        """A group of some of these ranks, or of all, which each of their processes must make.

        Args:
            ranks: those that take part, in the order of their places in the new group.
            transport: as for ``Group``; this group's by default.
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
        """How many ranks the group has, those of other processes included."""
        return len(self.peers)

    def give_up(self, reason: str, linger: float = 5.0) -> None:
        """Tell all ranks that this process's step has failed: see ``Communicator.give_up``."""
        self.join()
        self.communicators[0].give_up(reason, linger)

    def join(self) -> None:
        """Wait for all ranks of the group, if no collective has brought them together yet."""

        @tf.function(autograph=False)
        def join() -> None:
            for communicator in self.communicators:
                with tf.device(communicator.device):
                    library.load().tfscale_join(communicator.handle)

        who = self.peers[self.communicators[0].rank]
        with tf.init_scope(), narrated(f"{who} waits until all {self.ranks} ranks have joined"):
            try:
                join.get_concrete_function()()  # TensorFlow would warn of traces in a row
            except tf.errors.DeadlineExceededError as error:
                raise tf.errors.DeadlineExceededError(
                    None, None, f"{error.message}. {self._silent()}", error.experimental_payloads
                ) from error

    def _silent(self) -> str:
        """A sentence that names the workers that do not answer."""
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

        The function that you get takes a list for each value, with one entry per
        local device, and returns a list of results.
        """

        def run(*per_device: Sequence[Any]) -> list[Any]:
            results = []
            for communicator, *values in zip(self.communicators, *per_device, strict=True):
                with tf.device(communicator.device):
                    results.append(body(communicator, *values))
            return results

        run.__name__ = getattr(body, "__name__", "run")  # the graph's name, and so the buckets'
        return tf.function(run, autograph=False)  # type: ignore[no-any-return]


def checked_patience(deadline: float, slow_after: float) -> tuple[float, float]:
    """Return how long ranks wait for each other."""
    what = "a number of seconds (0 for no warnings)"
    most = arguments.LONGEST
    slow_after = arguments.real(slow_after, "slow_after", 0, most, what=what)
    return arguments.seconds(deadline, "deadline"), slow_after


def checked_resolver(resolver: Any, name: str) -> Any:
    """Return a resolver that lists the workers."""
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


def _belongs_to_its_outer(graph: Any) -> bool:
    """Whether it runs as a part of the graph around it, as branches and loops do."""
    is_traced = hasattr(getattr(graph, "outer_graph", None), "outer_graph")
    return is_traced and "scratch_graph" not in graph.name  # as Keras 2 and 3 call theirs


def _full_names(devices: Sequence[str] | None) -> list[str]:
    # Names are short until this process joins a cluster, and then tell of other hosts, too.
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
    """A number that every rank of a group computes alike, and that no other group has.

    Groups are told apart by who is in them, and groups of the same devices by the
    order in which they were made, which is the same in every process. TensorFlow
    counts its own groups from one.
    """
    _made[tuple(devices)] += 1
    text = "\n".join([*devices, str(_made[tuple(devices)])])
    return 0x40000000 | zlib.crc32(text.encode()) >> 2


def resolver_of(
    given: Any,
    join_timeout: float = DEFAULT_JOIN_TIMEOUT,
    devices: Sequence[str] | None = None,
) -> Any:
    """The resolver that lists the workers: the given one, or that of ``TF_CONFIG``.

    If a launcher has started the workers and told them without it, ``TF_CONFIG`` is made first,
    and this worker takes its share of the host's GPUs, or splits its CPU, unless the caller names
    its devices.
    """
    by_variable = tf.distribute.cluster_resolver.TFConfigClusterResolver
    source = None if given else cluster.configure(timeout=join_timeout)
    if devices is None:
        split_cpu()
        if source:
            take_share(source)
    if given:
        cluster.note_rank(_number_of_worker(given))
    resolver = given or by_variable()
    if isinstance(resolver, by_variable):
        config.check(os.environ.get("TF_CONFIG", "{}"))
    return resolver


@contextlib.contextmanager
def starting(resolver: Any, deadline: float, join_timeout: float) -> Iterator[None]:
    """Wait for all workers before this worker's server starts, and say for whom it waits.

    A process starts its server once.
    """
    if resolver.task_type not in ("chief", "worker") or has_started():
        yield
        return
    if started.has_devices():
        raise RuntimeError(_TOO_LATE.format(by=started.words()))
    tasks, own = tasks_of(resolver), _task(resolver)
    workers = [Worker(_name(task), host) for task, host in tasks]
    if own not in dict(tasks):
        known = ", ".join(map(str, workers))
        raise ValueError(f"this worker is {_name(own)}, but the workers are {known}")
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
            f"connect: {error.message} ({unreachable(workers)})."
        ) from error


def has_started() -> bool:
    """Whether this process's server has."""
    return context().coordination_service is not None


def _outlast_tensorflow(
    resolver: Any, tasks: Sequence[tuple[str, str]], deadline: float, join_timeout: float
) -> None:
    """Set TensorFlow's timeouts by ours, before a worker's server starts.

    By default TensorFlow's coordination service ends the collectives of all workers if it has
    not heard from one for ten seconds, and their errors may name any worker. A worker reports
    twice in that time, so the service may miss it after half of the time. At the start it would
    wait for an hour.
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
    """The workers of a cluster, in the order of their ranks, and their addresses."""
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
    """The CPU beside a device."""
    return device.rpartition("/device:")[0] + "/device:CPU:0"


def _task(resolver: Any) -> str:
    return f"/job:{resolver.task_type}/replica:0/task:{resolver.task_id}/"


def _job(task: str) -> str:
    return task.split("/")[1].split(":")[1]


def _name(task: str) -> str:
    return f"{_job(task)} {task.split('/')[3].split(':')[1]}"


def _short(device: str) -> str:
    return device.rsplit("device:", 1)[-1]
